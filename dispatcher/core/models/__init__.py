"""Models: which ones the pool serves, their versions, and how versions are warmed up."""
