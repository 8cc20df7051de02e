"""The tiny policy of the quickstart and the tests."""
