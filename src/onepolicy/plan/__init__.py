"""What a run needs and how long a step takes, before anything is paid for."""
