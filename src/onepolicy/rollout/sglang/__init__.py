"""SGLang in a separate process."""
