"""The transformer and what one pass of it needs: batches of tensors, the paged cache, sampling."""
