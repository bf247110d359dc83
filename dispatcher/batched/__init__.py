"""`batched`: call a function of many items with single items. It does not use the queue."""
