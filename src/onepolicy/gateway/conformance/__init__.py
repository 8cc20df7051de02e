"""Conformance of gateways: requests of programs, and the tree that a gateway must make of them."""
