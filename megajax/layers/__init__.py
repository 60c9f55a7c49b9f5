"""Parts of networks. They know logical words only; communication and kernels enter through Ops."""
