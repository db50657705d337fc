/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stepped engine, for tests only: the real engine with simulated donors and a simulated backup,
 * and no thread. What a network, a disk or a thread would do is a step that the test orders, and
 * each step runs the very handler that a thread would run. Nothing of this is in the product.
 *
 * The functions of isw.h work on it as on any engine. isw_engine_destroy and
 * isw_sim_remote_reconnect wait for ever while transfers are held back: ISW_STEP_UNPLUG first, and
 * ISW_STEP_BACKUP_SLOW until there is none.
 *
 * A donor's memory is its own, or a store's outside (isw_sim_slot): then what the store says of a
 * slot when a request takes effect decides, and a reconnect fences nothing - the store has to have
 * done so (isw_sim_fence), or late writes go on landing.
 *
 * A process dies by isw_sim_take_over and isw_sim_bury: none of its handlers runs again, and it
 * leaves only its arena. What it had sent may still land, on donors until they are reconnected, and
 * on the disk before the successor begins (R13).
 */
#ifndef ISW_SIM_H
#define ISW_SIM_H

#include "isw.h"

/* cdef begin */
#define ISW_SIM_READ  1
#define ISW_SIM_WRITE 2
#define ISW_SIM_TRIM  3
#define ISW_SIM_ZERO  4
#define ISW_SIM_FLUSH 5
#define ISW_SIM_FUA   0x100
#define ISW_SIM_PLUG  0x200 /* its transfers may be held back until ISW_STEP_UNPLUG */

struct isw_sim_request {
	uint64_t id;
	uint64_t offset;
	uint64_t length;
	int32_t error;
	uint32_t op;
};

/* The numbers of backup threads in config mean nothing here. */
int isw_sim_create(const struct isw_engine_config *config, isw_engine **engine_out,
		   struct isw_error *error);
/* data: length bytes, copied for WRITE. */
int isw_sim_submit(isw_engine *engine, uint32_t op, uint64_t offset, uint64_t length,
		   const void *data, uint64_t *id_out);
/* Takes one completed request; for READ copies its bytes to data. Returns 1, or 0 when none. */
int isw_sim_reap(isw_engine *engine, struct isw_sim_request *done_out, void *data,
		 uint64_t data_bytes);
int isw_sim_remote(isw_engine *engine, uint32_t queues, uint32_t slots, uint32_t *remote_out);
/* New connections, the donor's bytes kept: a lease whose old epoch was fenced and drained. */
int isw_sim_remote_reconnect(isw_engine *engine, uint32_t remote);
/*
 * Puts memory outside, of a store, in the place of a donor's slot: borrowed, as long as a slab;
 * NULL: the slot is empty, its requests are refused. With the first call all others are empty.
 */
int isw_sim_slot(isw_engine *engine, uint32_t remote, uint32_t slot, void *memory);
/*
 * The donor closes its end: what was sent and has not taken effect never will. The engine hears of
 * it with ISW_STEP_REMOTE_DOWN.
 */
int isw_sim_fence(isw_engine *engine, uint32_t remote);
/*
 * The death of a stepped engine's process. `standby` (ISW_ENGINE_STANDBY) gets the same donors and
 * disk, or copies of them when `dead` shall go on, and takes over. What was under way to a donor
 * may still land there until it is reconnected; of each write under way to the disk all, nothing
 * or half has landed, as the bits of `landed` say, two for each.
 */
int isw_sim_take_over(isw_engine *standby, isw_engine *dead, uint64_t landed,
		      struct isw_error *error);
/* Frees what a killed process had. Its state file is its successor's, and left alone. */
void isw_sim_bury(isw_engine *dead);
/* Transfers under way to a simulated donor. */
int isw_sim_pending(isw_engine *engine, uint32_t remote);

/* What can happen next; r is a remote, n one of those pending (modulo their count). */
#define ISW_STEP_REMOTE_APPLY   1  /* transfer n of remote r takes effect on the donor */
#define ISW_STEP_REMOTE_REPLY   2  /* its reply arrives (applied first if it was not) */
#define ISW_STEP_REMOTE_FAIL    3  /* it is answered with an error; the donor keeps old bytes */
#define ISW_STEP_REMOTE_TEAR    4  /* half of a write lands, the connection breaks */
#define ISW_STEP_REMOTE_CORRUPT 5  /* a read is answered with wrong bytes, as if they were right */
#define ISW_STEP_REMOTE_DOWN    6  /* the connections break; transfers in flight may land late */
#define ISW_STEP_REMOTE_LATE    7  /* one such late write lands (refused once reconnected) */
#define ISW_STEP_REMOTE_WIPE    8  /* slot n of the donor is zeroed: a fresh slab */
#define ISW_STEP_BACKUP_TAKE    9  /* a backup writer (r = 1: a reader) takes its next job */
#define ISW_STEP_BACKUP_DONE    10 /* job n reaches the disk and is reported */
/* ... with an error (r = 1: of a medium that has lost it); of a write half the bytes have landed */
#define ISW_STEP_BACKUP_FAIL  11
#define ISW_STEP_BACKUP_RETRY 12 /* the time to retry failed pages has come */
#define ISW_STEP_UNPLUG       13 /* what is held back is sent */
#define ISW_STEP_REMOTE_SLOW  14 /* transfer n of remote r has taken too long */
#define ISW_STEP_BACKUP_SLOW  15 /* so has a read of the backup that the donor could answer */

/*
 * Returns 1 when something was done, 0 when nothing of that kind was pending, negative on misuse.
 */
int isw_engine_step(isw_engine *engine, uint32_t step, uint32_t r, uint32_t n);
/* cdef end */

#endif
