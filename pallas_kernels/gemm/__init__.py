"""A matrix product whose epilogue adds bias, activation and residual."""
