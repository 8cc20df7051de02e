"""Recurrent layers (gated delta rule, Mamba, short convolutions) over packed samples."""
