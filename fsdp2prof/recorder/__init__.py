"""Recording a training run: the launcher around it, and what runs inside each rank."""
