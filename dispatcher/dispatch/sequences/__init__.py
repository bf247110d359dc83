"""The part of the request pipeline that keeps sequences in order."""
