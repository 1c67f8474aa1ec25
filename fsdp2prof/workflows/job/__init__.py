"""Where a job's files are: folders, names, URLs, and the ranks chosen."""
