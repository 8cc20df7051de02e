"""Make both engines the same, bit for bit: operators with one result per row, whatever else is computed."""
