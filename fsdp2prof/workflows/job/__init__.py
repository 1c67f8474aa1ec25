"""Where a job's files are: folders, names, URLs, what was chosen of them."""
