"""Where a job stands, by what torch's Flight Recorder kept of its ranks."""
