"""A run that heals itself: a driver for the job, an agent on every host (MegaScale section 4).

No jax import anywhere here: a driver starts in a tenth of a second and never touches a device.
"""
