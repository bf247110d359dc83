"""The part of the request pipeline that sends requests together."""
