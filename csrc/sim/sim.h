/* SPDX-License-Identifier: Apache-2.0 */
/* What a stepped engine is made of, for C tests that look inside. See isw_sim.h. */
#ifndef ISWI_SIM_H
#define ISWI_SIM_H

#include "engine/backup/backup.h"
#include "engine/engine.h"
#include "engine/ops/ops.h"
#include "engine/remote/remote.h"
#include "engine/state/memory.h"
#include "engine/state/seal.h"
#include "sim/isw_sim.h"

#define ISWI_SIM_REMOTES   16u
#define ISWI_SIM_TRANSFERS 1024u
#define ISWI_SIM_JOBS      16u

struct iswi_sim_transfer {
	struct iswi_xfer *xfer;
	bool applied;
	int error; /* the donor's answer, once applied */
};

/* A write whose connection broke before it landed. */
struct iswi_sim_late {
	uint64_t offset;
	uint32_t length;
	unsigned char *bytes;
};

struct iswi_sim_donor {
	struct isw_engine *engine;
	uint32_t remote;
	unsigned char *memory;
	unsigned char **slots; /* NULL, or where each slot lies outside */
	uint64_t bytes;
	struct iswi_sim_transfer pending[ISWI_SIM_TRANSFERS];
	uint32_t pending_count;
	struct iswi_sim_late late[ISWI_SIM_TRANSFERS];
	uint32_t late_count;
	uint32_t queues;
	bool down;
	bool fenced; /* the donor's end of the connections is closed */
};

struct iswi_sim_queue {
	struct iswi_queue base;
	struct iswi_sim_donor *donor;
};

struct iswi_sim_req {
	struct iswi_req req;
	struct iswi_sim_req *next;
	struct iswi_sim_req *open_next, **open_link; /* of those not reaped */
	uint64_t id;
	uint32_t op;
	struct iswi_sim *sim;
};

struct iswi_sim {
	struct isw_engine *engine;
	struct iswi_clock clock;
	uint64_t now_ns;
	unsigned char *disk;
	struct iswi_sim_donor *donors[ISWI_SIM_REMOTES];
	struct iswi_job jobs[ISWI_SIM_JOBS];
	uint32_t jobs_count;
	uint64_t ids;
	struct iswi_plug plug;
	struct iswi_sim_req *done, **done_tail, *open;
};

/* Of a stepped engine; NULL of any other. */
struct iswi_sim *iswi_sim_of(const struct isw_engine *e);

#endif
