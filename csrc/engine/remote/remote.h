/* SPDX-License-Identifier: Apache-2.0 */
/* Remotes: the connections to each donor, and what goes over them. */
#ifndef ISWI_REMOTE_REMOTE_H
#define ISWI_REMOTE_REMOTE_H

#include "engine/request.h"
#include "engine/state/op.h"
#include "engine/state/place.h"
#include "engine/state/speed.h"
#include "transport/transport.h"

#define ISWI_REMOTE_QUEUES_MAX 16u
/* So many pages keep to one connection, where a sequential run of them is one transfer. */
#define ISWI_STRIPE_PAGES ISWI_XFER_PAGES_MAX
/* A donor that owes this many slow reads is not asked for what the backup has. */
#define ISWI_OWED_MAX 8u

enum iswi_remote_state {
	ISWI_REMOTE_UNUSED,
	ISWI_REMOTE_UP,
	ISWI_REMOTE_DOWN,
	ISWI_REMOTE_CHANGING /* a control thread connects or destroys it */
};

struct iswi_remote {
	struct isw_engine *engine;
	atomic_int state;         /* seq_cst, pairs with the slabs' words: see fence in remote.c */
	atomic_bool broken;       /* a queue went down; set before state is looked at */
	atomic_uint fencing;      /* threads that still shut queues down; seq_cst */
	atomic_uint queues_count; /* like queues: published by state, looked at for status */
	struct iswi_queue *queues[ISWI_REMOTE_QUEUES_MAX];
	/* Like queues, where the transport wants one: no pages go over it, it sees the donor's
	 * death. */
	struct iswi_queue *witness;
	atomic_uint transport; /* ISW_TRANSPORT_*; relaxed: for statistics */
	struct iswi_queue_events events;
	/* Relaxed statistics; pages by transport. */
	atomic_uint_fast64_t read_pages[ISW_TRANSPORTS], write_pages[ISW_TRANSPORTS], errors;
	/* Relaxed: a guess, to which each queue's thread contributes; a lost one does no harm. */
	atomic_uint_fast64_t read_tail_ns, tail_raised_ns;
	struct iswi_speed speed; /* of all its reads */
	atomic_uint owed; /* slow reads it has not answered yet; relaxed: a guess for others */
};

/* By who holds a use of it. */
static inline struct iswi_remote *iswi_remote_of(const struct isw_engine *e, uint32_t slab,
						 uint32_t place)
{
	return &e->remotes[atomic_load_explicit(&iswi_place(e, slab, place)->remote,
						memory_order_relaxed)];
}

/* remote.c, traffic.c */
/* Sends a chain of ops (linked through xfer.next), each holding a use of its place. */
void iswi_remote_submit(struct isw_engine *e, struct iswi_op *first);
/* The same at unplug, or at once when plug is NULL. */
void iswi_remote_send(struct isw_engine *e, struct iswi_op *first, struct iswi_op *last,
		      struct iswi_plug *plug);
/* Counts the error and gives back the use of the place, which may then become another donor's. */
void iswi_remote_ended(struct isw_engine *e, const struct iswi_op *op, int error);
/* After how long a read of this remote is slow, in microseconds; 0: it never is. */
uint32_t iswi_remote_slow_after_us(const struct isw_engine *e, const struct iswi_remote *r);
/* A read of this remote was answered. */
void iswi_remote_note_read(struct iswi_remote *r, uint64_t submitted_ns, uint64_t now_ns);
/* This read of a remote is slow and not answered yet: owed. Returns for how long it was not. */
uint64_t iswi_remote_note_slow(struct isw_engine *e, struct iswi_op *op);
/* It owes so many slow reads that others had better pass it by. */
bool iswi_remote_avoid(const struct iswi_remote *r);
/* Once, before any remote is reserved. */
void iswi_remote_init(struct isw_engine *e);
/* Reserves a remote number in CHANGING state: a new one, or `remote` itself when it is DOWN. */
int iswi_remote_reserve(struct isw_engine *e, uint32_t *remote);
/* Waits until the old queues are unused, then destroys them. -ETIMEDOUT. */
int iswi_remote_retire(struct isw_engine *e, uint32_t remote);
/* From CHANGING to UP with these queues, or back to `idle_state` when count is 0. */
void iswi_remote_set(struct isw_engine *e, uint32_t remote, struct iswi_queue **queues,
		     uint32_t count, enum iswi_remote_state idle_state);
/* Declares it down: slabs SUSPENDED first, then its queues are shut down. */
void iswi_remote_fence(struct isw_engine *e, uint32_t remote, int error);
void iswi_remote_stop_all(struct isw_engine *e);

#endif
