-- Check the permission for all commands that any script of an owner runs, whichever script this is.
-- Uses: require_commands
require_commands(
  'TYPE', 'TIME', 'EXISTS', 'GET', 'SET', 'DEL', 'EXPIRE', 'LPUSH', 'HGET', 'HMGET', 'HSET', 'HDEL', 'HEXISTS', 'HKEYS',
  'HINCRBY', 'HSTRLEN', 'GETRANGE', 'ZADD', 'ZREM', 'ZCARD', 'ZSCORE', 'ZRANGE', 'ZRANGEBYSCORE', 'ZREMRANGEBYRANK',
  'ZPOPMIN')
