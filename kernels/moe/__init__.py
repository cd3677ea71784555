"""What a mixture of experts does beside its products: where rows go, and moving and adding them up."""
