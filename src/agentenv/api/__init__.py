"""The HTTP surface of the control plane: routes, models, authentication, error shape, pagination. No decisions."""
