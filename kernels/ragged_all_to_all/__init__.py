"""The kernel of `ragged_all_to_all`."""
