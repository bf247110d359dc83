-- All that the steps of a dispatcher run, whichever of them this is.
need('TYPE', 'TIME', 'EXISTS', 'GET', 'SET', 'DEL', 'EXPIRE', 'LPUSH', 'HGET', 'HMGET', 'HSET', 'HDEL', 'HEXISTS', 'HKEYS',
     'HINCRBY', 'HSTRLEN', 'GETRANGE', 'ZADD', 'ZREM', 'ZCARD', 'ZSCORE', 'ZRANGE', 'ZRANGEBYSCORE', 'ZREMRANGEBYRANK', 'ZPOPMIN')
