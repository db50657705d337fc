/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the RDMA transport.
 *
 * A transfer's way:  submit → pending FIFO → ring (its sequence number is the work request's id) →
 * posted → completed → done.
 *
 * A reliable connection completes in the order of posting. So the ring is a FIFO, one completion
 * stands for all before it, and only the last of a batch and every RDMA_SIGNAL_EVERYth asks for
 * one. An error completion fails the whole queue: what is posted behind it is flushed.
 *
 * READs land in the bounce buffer, a second ring of bytes that is registered with the queue. So the
 * caller's buffer may be anybody's, it may be exchanged while the READ is under way (`slow`), and a
 * late answer lands in memory that is still ours. WRITEs go straight from registered staging.
 *
 * Threads: see queue.h. A submitter posts what fits under the lock, because a queue pair takes one
 * at a time anyway. The receiver thread alone polls, copies READs out and calls done and slow. The
 * only system call under the lock is the doorbell of a device that is software.
 */
#ifndef ISWI_RDMA_INTERNAL_H
#define ISWI_RDMA_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "transport/queue.h"
#include "transport/rdma.h"
#include "util/util.h"

#define RDMA_BOUNCE_BYTES   (2u << 20) /* at least; of each queue */
#define RDMA_BATCH          16
#define RDMA_SIGNAL_EVERY   16
#define RDMA_POLL           32
#define RDMA_FLUSH_MS       2000
#define RDMA_SPIN_NS_MAX    20000ull
#define RDMA_SPIN_NS_MIN    1000ull
#define RDMA_SPIN_TRY_EVERY 64 /* sleeps, then one try whether spinning pays by now */

struct rdma_slot {
	struct iswi_xfer *xfer;
	char *bounce;        /* NULL: it is sent from its own buffer */
	uint64_t bounce_end; /* what is free when it is done, see bounce_tail */
};

struct isw_rdma_offer {
	const isw_engine *engine;
	struct iswi_rdma_domain *domain;
	struct iswi_rdma_places *places;
	uint32_t count;
	struct iswi_queue *queues[ISW_RDMA_QUEUES_MAX]; /* NULL: a remote has it */
	struct isw_rdma_end ends[ISW_RDMA_QUEUES_MAX];
};

struct rdma_place {
	atomic_uint_fast64_t address; /* published by key */
	atomic_uint_fast64_t key;     /* 0: none, else the key plus RDMA_KEY_THERE */
};

#define RDMA_KEY_THERE (1ull << 32)

struct iswi_rdma_places {
	atomic_uint users; /* the offer and its queues; with the last it is freed */
	uint32_t count;
	struct rdma_place place[];
};

struct iswi_rdma {
	struct iswi_tq tq;
	const struct iswi_verbs *verbs;
	struct iswi_rdma_domain *domain;
	struct iswi_rdma_places *places;
	struct iswi_verbs_choice choice;
	uint64_t slab_bytes;
	uint32_t psn;
	uint32_t depth;
	struct iswi_vcq *cq;
	struct iswi_vqp *qp;
	int cq_fd;
	struct iswi_vmr *bounce_mr;
	uint32_t bounce_lkey;
	uint64_t bounce_bytes;
	char *bounce;
	bool started; /* by who connected it; the thread runs, or has */
	char thread_name[16];

	/* Receiver thread only. */
	uint64_t spin_ns, spin_ns_max, spin_until_ns;
	uint32_t sleeps;

	/* Everything below is under tq.lock. */
	/* Sequence numbers: [head, tail) are in the ring, those below posted were posted. */
	uint64_t head, tail, posted;
	uint64_t bounce_head, bounce_tail; /* bytes; places modulo bounce_bytes */
	struct rdma_slot *slot;            /* depth */
};

/* ---- rdma_domain.c */
/* Says what to do about memory that cannot be registered; returns code. */
int iswi_rdma_memory_error(int code, const char *what, struct isw_error *error);

/* ---- rdma_queue.c: lock held */
/* Posts what fits. An error fails the queue: then the receiver thread is to be woken. */
void iswi_rdma_post_pending(struct iswi_rdma *rdma);
struct rdma_slot *iswi_rdma_slot(struct iswi_rdma *rdma, uint64_t number);
/* Everything that is in the ring or pending, as a chain; both are empty then. */
struct iswi_xfer *iswi_rdma_take_all(struct iswi_rdma *rdma);

/* ---- rdma_queue.c: lock not held */
/* Where the transfer's bytes lie there. False: the slot has no key. */
bool iswi_rdma_locate(const struct iswi_rdma *rdma, const struct iswi_xfer *xfer,
		      uint64_t *address_out, uint32_t *key_out);
/* One user more. */
void iswi_rdma_places_hold(struct iswi_rdma_places *places);

/* ---- rdma_recv.c */
void *iswi_rdma_receiver(void *rdma);

#endif
