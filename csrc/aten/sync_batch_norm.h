#pragma once

namespace acc::aten {

// What SyncBatchNorm calls. PyTorch has kernels for GPUs alone; on a host these are operators of
// their own, put together from others that are recorded. As soon as it is known to be one.
void register_sync_batch_norm();

}  // namespace acc::aten
