"""The user's functions in processes of their own: what they do there, the driver and the run outlive."""
