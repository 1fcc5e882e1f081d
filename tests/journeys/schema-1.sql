CREATE TABLE accounts (
	id VARCHAR(64) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	ed25519 VARCHAR(44) NOT NULL, 
	token_hash VARCHAR(71) NOT NULL, 
	created VARCHAR(27) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (ed25519), 
	UNIQUE (token_hash)
);
CREATE TABLE log_entries (
	"index" INTEGER NOT NULL, 
	round VARCHAR(120) NOT NULL, 
	type VARCHAR(32) NOT NULL, 
	data BLOB NOT NULL, 
	PRIMARY KEY ("index")
);
CREATE INDEX ix_log_entries_round ON log_entries (round);
CREATE TABLE log_checkpoints (
	size INTEGER NOT NULL, 
	note TEXT NOT NULL, 
	at VARCHAR(27) NOT NULL, 
	PRIMARY KEY (size)
);
CREATE TABLE outbox (
	id INTEGER NOT NULL, 
	round VARCHAR(120) NOT NULL, 
	stage VARCHAR(71), 
	payload JSON NOT NULL, 
	run VARCHAR(64), 
	PRIMARY KEY (id), 
	UNIQUE (stage)
);
CREATE INDEX ix_outbox_round ON outbox (round);
CREATE TABLE invitations (
	code_hash VARCHAR(71) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	used_by VARCHAR(64), 
	PRIMARY KEY (code_hash), 
	FOREIGN KEY(used_by) REFERENCES accounts (id)
);
CREATE TABLE rounds (
	id VARCHAR(120) NOT NULL, 
	competition VARCHAR(64) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	definition VARCHAR(71) NOT NULL, 
	created VARCHAR(27) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (competition, name), 
	FOREIGN KEY(owner) REFERENCES accounts (id)
);
CREATE TABLE seals (
	seal VARCHAR(71) NOT NULL, 
	round VARCHAR(120) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	header JSON NOT NULL, 
	envelopes JSON NOT NULL, 
	number INTEGER NOT NULL, 
	received VARCHAR(27) NOT NULL, 
	succeeded VARCHAR(27), 
	PRIMARY KEY (seal), 
	FOREIGN KEY(round) REFERENCES rounds (id)
);
CREATE INDEX ix_seals_round ON seals (round);
CREATE TABLE submissions (
	id VARCHAR(36) NOT NULL, 
	round VARCHAR(120) NOT NULL, 
	entrant VARCHAR(64) NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	commitment VARCHAR(71) NOT NULL, 
	nonce VARCHAR(44) NOT NULL, 
	manifest JSON NOT NULL, 
	acceptance JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT NOT NULL, 
	committed_index INTEGER NOT NULL, 
	accepted_index INTEGER, 
	created VARCHAR(27) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (round, commitment), 
	FOREIGN KEY(round) REFERENCES rounds (id), 
	FOREIGN KEY(owner) REFERENCES accounts (id)
);
CREATE INDEX ix_submissions_round ON submissions (round);
CREATE TABLE openings (
	round VARCHAR(120) NOT NULL, 
	files JSON NOT NULL, 
	code VARCHAR(32) NOT NULL, 
	problem TEXT NOT NULL, 
	at VARCHAR(27) NOT NULL, 
	PRIMARY KEY (round), 
	FOREIGN KEY(round) REFERENCES rounds (id)
);
CREATE TABLE share_documents (
	seal VARCHAR(71) NOT NULL, 
	"index" INTEGER NOT NULL, 
	document BLOB NOT NULL, 
	PRIMARY KEY (seal, "index"), 
	FOREIGN KEY(seal) REFERENCES seals (seal)
);
CREATE TABLE quota_ledger (
	id INTEGER NOT NULL, 
	round VARCHAR(120) NOT NULL, 
	entrant VARCHAR(64) NOT NULL, 
	submission VARCHAR(36) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	delta INTEGER NOT NULL, 
	reason TEXT NOT NULL, 
	at VARCHAR(27) NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(round) REFERENCES rounds (id), 
	FOREIGN KEY(submission) REFERENCES submissions (id)
);
CREATE INDEX ix_quota_ledger_round ON quota_ledger (round);
CREATE TABLE uploads (
	submission VARCHAR(36) NOT NULL, 
	digest VARCHAR(71) NOT NULL, 
	size INTEGER NOT NULL, 
	at VARCHAR(27) NOT NULL, 
	PRIMARY KEY (submission, digest), 
	FOREIGN KEY(submission) REFERENCES submissions (id)
);
CREATE TABLE stages (
	"key" VARCHAR(71) NOT NULL, 
	round VARCHAR(120) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	submission VARCHAR(36) NOT NULL, 
	task VARCHAR(64), 
	seed INTEGER, 
	protocol VARCHAR(16), 
	state VARCHAR(16) NOT NULL, 
	attempt VARCHAR(71), 
	attempts INTEGER NOT NULL, 
	progress FLOAT NOT NULL, 
	reason TEXT NOT NULL, 
	heartbeat VARCHAR(27), 
	PRIMARY KEY ("key"), 
	FOREIGN KEY(round) REFERENCES rounds (id), 
	FOREIGN KEY(submission) REFERENCES submissions (id)
);
CREATE INDEX ix_stages_round ON stages (round);
CREATE TABLE results (
	stage VARCHAR(71) NOT NULL, 
	document JSON NOT NULL, 
	at VARCHAR(27) NOT NULL, 
	PRIMARY KEY (stage), 
	FOREIGN KEY(stage) REFERENCES stages ("key")
);
CREATE TRIGGER log_entries_no_update BEFORE UPDATE ON log_entries
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only'); END;
CREATE TRIGGER log_entries_no_delete BEFORE DELETE ON log_entries
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only'); END;
CREATE TRIGGER log_entries_in_order BEFORE INSERT ON log_entries
  WHEN NEW."index" <> COALESCE((SELECT MAX("index") + 1 FROM log_entries), 0)
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only and without gaps'); END;
CREATE TRIGGER results_no_update BEFORE UPDATE ON results
  BEGIN SELECT RAISE(ABORT, 'results is insert-only'); END;
CREATE TRIGGER results_no_delete BEFORE DELETE ON results
  BEGIN SELECT RAISE(ABORT, 'results is insert-only'); END;
CREATE TRIGGER results_no_replace BEFORE INSERT ON results
  WHEN EXISTS (SELECT 1 FROM results WHERE stage = NEW.stage)
  BEGIN SELECT RAISE(ABORT, 'results is insert-only: this stage has a result'); END;
PRAGMA user_version = 1;
