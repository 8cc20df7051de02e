"""Where completions come from: `collect` drives episodes, one folder per engine samples tokens."""
