-- Requests whose model is not served. They wait in a lane of their own (requests/lanes.py), at no cost to other
-- requests.
-- Feature: models
-- Extra: MODEL_WAIT 15
-- Keys: WAITING_FOR_MODEL zset waiting-for-model, WAITING_FOR_MODEL_ORDER zset waiting-for-model:order,
--     WAITING_FOR_MODEL_COUNTS zset waiting-for-model:counts
-- Pool keys: WARM_MARKERS zset models:warm, WARM_UP_LOCKS zset models:warm-up-locks, MODELS_IN_USE zset models:in-use,
--     LABELS zset models:labels, DRAINS zset models:drains, PINS hash models:pins,
--     PINS_LAST_USED zset models:pins:last-used
-- Lane: WAITING_FOR_MODEL A closed
-- Constants: MAX_CANCEL_CHECKS_PER_SWEEP 250, MAX_COUNTED_MODELS 1000, WARM_MARKER_S 60, WARM_UP_LOCK_S 30,
--     MODEL_IN_USE_S 15, MAX_MARKERS 100000, MAX_PIN_S 31536000, MAX_LABELS_OR_DRAINS 1000
-- A check for a cancel marker takes 1 to 2 ms of the server's time.
--
-- WAITING_FOR_MODEL         the lane, by score, like every lane
-- WAITING_FOR_MODEL_ORDER   the same entries by model, in the order of bytes: '<length of the name, 3 digits><model>:
--                           <score, 16 hexadecimal digits><entry, 16 digits>'. The first requests of a model are found
--                           without reading those of other models, and no name is the beginning of another name.
-- WAITING_FOR_MODEL_COUNTS  the models, by the number of requests that wait for each
--
-- MODEL_WAIT in the state of an entry has the name of the model, and the request id and token by which the request
-- can be cancelled (empty if it cannot), for as long as the entry is in the lane.
local models = features.models

function models.lane.contains(state) return state[MODEL_WAIT] end
function models.has_data() return call('EXISTS', WAITING_FOR_MODEL) == 1 end
function models.count() return call('ZCARD', WAITING_FOR_MODEL) end
function models.waits_for(state) return state[MODEL_WAIT] and state[MODEL_WAIT][1] end
