"""Parameters of requests to pooling models."""

from eagleray.client.pooling import PoolingParams

__all__ = ["PoolingParams"]
