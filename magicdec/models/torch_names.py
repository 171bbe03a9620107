"""Names that differ between the supported versions of PyTorch."""

import torch.distributed as dist

# PyTorch 2.11 has the operation by its older name only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
