"""`batched`: single items in, single results out, over a function of many. Nothing of the queue."""
