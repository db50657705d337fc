/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transport seam: one const table of functions per transport, and queues made by it. A queue is
 * one connection to one lease on one donor; the engine knows nothing else about how bytes reach a
 * donor. Implementations: tcp.c (NBD over TCP), rdma.c (one-sided RDMA), and the simulated remotes
 * of tests (sim/sim.c).
 *
 * A further transport has its own files here, a line in transport.c, and its fields of
 * isw_remote_config in isw.h. The donor's side of the seam is store/store.h.
 */
#ifndef ISWI_TRANSPORT_H
#define ISWI_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "isw.h"

struct iswi_clock; /* util/util.h */

/* No transfer is longer. */
#define ISWI_XFER_PAGES_MAX 256u

enum iswi_xfer_kind { ISWI_XFER_READ, ISWI_XFER_WRITE };

/*
 * One transfer between a buffer of ours and the lease's slots. The submitter owns it; the
 * transport borrows it, and buf, from submit until it calls done.
 */
struct iswi_xfer {
	struct iswi_xfer *next; /* the transport's own while it has the transfer */
	enum iswi_xfer_kind kind;
	uint32_t length;       /* bytes, a multiple of ISW_PAGE_BYTES */
	uint64_t offset;       /* in the export */
	void *buf;             /* NULL, of a READ that was slow: what arrives is dropped */
	uint64_t submitted_ns; /* these two are set by the transport at submit */
	uint64_t deadline_ns;
	/* Exactly once, on any thread, maybe inside submit; error: 0 or -errno. */
	void (*done)(struct iswi_xfer *xfer, int error);
	/*
	 * Of a READ with slow_us not 0: called once, when it has taken about that long, by a
	 * transport that can keep this promise: nobody touches buf, and done does not run, until
	 * slow returns. So slow may put another buffer in the place of buf, to which it has first
	 * copied the `received` bytes that are in buf already, or NULL; the transport then never
	 * touches the old one again. It may submit, and set slow_us to be called again when the
	 * READ has taken that long. A transport may also never call it.
	 */
	void (*slow)(struct iswi_xfer *xfer, uint32_t received);
	uint32_t slow_us;
};

struct iswi_queue;
struct iswi_queue_events;

struct iswi_transport_ops {
	const char *name;
	uint32_t kind; /* ISW_TRANSPORT_*: pages are counted under it */
	/*
	 * Optional: what stays connected beside its queues and carries no page, because they do not
	 * notice a donor's death.
	 */
	const struct iswi_transport_ops *witness;
	/*
	 * Makes the queue `number` of the config->queues to one donor, ready for use. Optional:
	 * NULL where queues are made in another way (a simulation). A control thread,
	 * blocks for connect_ms_max at most. config is borrowed until it returns, *events is
	 * copied; `engine` is whose queue it will be, and is only compared. No transfer will be
	 * longer than transfer_bytes_max.
	 */
	int (*connect)(const isw_engine *engine, const struct isw_remote_config *config,
		       uint32_t number, uint32_t transfer_bytes_max,
		       const struct iswi_queue_events *events, struct iswi_queue **queue_out,
		       struct isw_error *error);
	/*
	 * Says where a slot's slab lies at the donor, for all queues to the same lease. Optional:
	 * NULL where the slot's number is enough. A control thread, does not wait; not while
	 * requests for the slot are under way. -EINVAL: there is no such slot.
	 */
	int (*place)(struct iswi_queue *queue, uint32_t slot, const struct isw_rdma_key *key);
	/*
	 * Whether the host is removing the device below, so that the queue must be given up.
	 * Optional: NULL where that cannot happen. A control thread, does not wait.
	 */
	bool (*is_leaving)(struct iswi_queue *queue);
	/*
	 * Required. Any thread, with no engine lock held; does not wait for the network. first is
	 * a chain (->next, NULL-terminated) sent as one batch. On a queue that is down, done is
	 * called with -ESHUTDOWN before submit returns.
	 */
	void (*submit)(struct iswi_queue *queue, struct iswi_xfer *first);
	/*
	 * Required. Any thread, may be called again; does not wait. The down callback and an
	 * error for each transfer in flight follow, unless the queue was down already.
	 */
	void (*shutdown)(struct iswi_queue *queue);
	/*
	 * Required. Not on the transport's own thread, blocks: shuts down, waits until each
	 * transfer was ended and no callback runs or can follow, then frees the queue.
	 */
	void (*destroy)(struct iswi_queue *queue);
};

/* Implementations embed this first. */
struct iswi_queue {
	const struct iswi_transport_ops *ops;
};

/*
 * The queue stopped working: broken connection, a reply that is not ours, a deadline missed. At
 * most once in a queue's life, on the transport's thread, and BEFORE any transfer is ended with
 * an error because of it - so the submitter can fence first. A transfer's own failure (the donor
 * answered it with an error) does not bring the queue down.
 *
 * The deadline ends our wait, not the operation: bytes may still reach the donor after down,
 * until the donor has fenced the connection. But when done has been called, the transport itself
 * touches buf no more.
 */
struct iswi_queue_events {
	void (*down)(void *ctx, int error);
	void *ctx;
};

/* ---- transport.c */
/* The transport by which the remote will be reached. */
const struct iswi_transport_ops *iswi_transport_for(const struct isw_remote_config *config);
/* Frees what the config holds for its transport and no queue has taken. */
void iswi_transport_release(const struct isw_remote_config *config);

#endif
