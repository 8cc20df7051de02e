"""Reports: a run folder as one HTML file, or a table in the terminal."""
