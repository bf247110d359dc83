"""The part of the request pipeline that sends several requests in one call."""
