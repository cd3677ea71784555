"""The kernel of `decode_attention`."""
