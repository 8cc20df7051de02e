"""Problems and their graders."""
