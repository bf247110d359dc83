"""The part of the request pipeline that resolves models, their versions and their warm-up."""
