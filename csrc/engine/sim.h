/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stepped engine: the real engine with simulated donors and backup, and no thread. What a
 * network, a disk or a thread would do is a step that the test orders (isw_engine_step):
 *
 *   REMOTE_APPLY    transfer n takes effect: a write lands on the donor, a read takes its bytes
 *   REMOTE_REPLY    its answer arrives (taking effect first if it had not)
 *   REMOTE_FAIL     the donor answers it with an error, nothing has landed
 *   REMOTE_CORRUPT  a read is answered with wrong bytes, as if they were right
 *   REMOTE_TEAR     half of a write lands, then the connections break
 *   REMOTE_DOWN     the connections break. Writes that had not landed may still do so ...
 *   REMOTE_SLOW     a read has taken so long that the transport tells; its bytes may be there, or
 * not REMOTE_LATE     ... which is this, until the remote is reconnected: a reconnect stands for a
 *                   lease whose old epoch the donor has fenced and drained
 *   REMOTE_WIPE     slot n of the donor is zeroed (a fresh slab)
 *   BACKUP_TAKE     r = 0: a writer takes its next job, r = 1: a reader does
 *   BACKUP_DONE     job n reaches the disk and is reported
 *   BACKUP_FAIL     job n fails; of a write, half the bytes have landed
 *   BACKUP_RETRY    the time to retry failed pages has come
 *   UNPLUG          the front end's thread has no more requests at hand
 *
 * A donor's memory is its own, or a store's outside (isw_sim_slot): then what the store says of a
 * slot when a request takes effect decides, and a reconnect fences nothing - the store has to have
 * done so (isw_sim_fence), or late writes go on landing.
 *
 * A process dies by isw_sim_take_over and isw_sim_bury: no handler of it runs any more, and what it
 * leaves is its arena. What it had sent may still land, on donors until they are reconnected, and
 * on the disk before the successor begins (R13).
 *
 * Nothing else is simulated: every handler is the one that threads run.
 */
#ifndef ISWI_SIM_H
#define ISWI_SIM_H

#include "engine/internal.h"

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

#endif
