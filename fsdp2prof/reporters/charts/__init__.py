"""Charts of results: plotly figures as plain JSON."""
