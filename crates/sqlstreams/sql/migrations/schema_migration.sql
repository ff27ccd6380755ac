-- Which migrations this schema has had. Programs of every version read it before anything else: it keeps its columns.
CREATE TABLE schema_migration (
    version     int PRIMARY KEY,
    -- the oldest version of programs that can work with the schema since
    oldest      int NOT NULL,
    name        text NOT NULL,
    checksum    text NOT NULL,
    -- which functions came with it; NULL: none yet
    functions   text,
    applied_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by  text NOT NULL DEFAULT session_user,
    -- NULL: it is under way, or was interrupted
    finished_at timestamptz
);
