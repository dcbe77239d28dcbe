"""Templates: named states that sandboxes are created from."""
