DROP FUNCTION holdfast.give_back(uuid, uuid, integer);
