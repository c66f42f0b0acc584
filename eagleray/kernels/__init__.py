"""What layers compute with: plain torch in `reference`, and what a device does better."""
