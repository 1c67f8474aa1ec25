"""For agents: the verbs as tools of the Model Context Protocol, and a skill that says how to use them."""
