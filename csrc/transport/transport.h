/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transport seam: one queue to one lease on one donor. The engine knows nothing else about
 * how bytes reach a donor. Implementations: tcp.c (NBD over TCP), fault.c (a layer that breaks
 * another transport, for tests), and the engine's simulated remotes (sim/sim.c).
 */
#ifndef ISWI_TRANSPORT_H
#define ISWI_TRANSPORT_H

#include <stdint.h>

#include "isw.h"

struct iswi_clock; /* util/util.h */

enum iswi_xfer_kind { ISWI_XFER_READ, ISWI_XFER_WRITE };

/*
 * One transfer between a buffer of ours and the lease's slots. The submitter owns it; the
 * transport borrows it, and buf, from submit until it calls done.
 */
struct iswi_xfer {
	struct iswi_xfer *next; /* the transport's own while it has the transfer */
	enum iswi_xfer_kind kind;
	uint32_t length; /* bytes, a multiple of ISW_PAGE_BYTES */
	uint64_t offset; /* in the export */
	void *buf;
	uint64_t submitted_ns; /* these two are set by the transport at submit */
	uint64_t deadline_ns;
	/* Exactly once, on any thread, maybe inside submit; error: 0 or -errno. */
	void (*done)(struct iswi_xfer *xfer, int error);
	/*
	 * Of a READ with slow_us not 0: called at most once, when it has taken about that long, by
	 * a transport that can keep this promise: nobody touches buf, and done does not run, until
	 * slow returns. So slow may put another buffer in the place of buf, to which it has first
	 * copied the `received` bytes that are in buf already; the transport then never touches
	 * the old one again. It may submit. A transport may also never call it.
	 */
	void (*slow)(struct iswi_xfer *xfer, uint32_t received);
	uint32_t slow_us;
};

struct iswi_queue;

struct iswi_transport_ops {
	const char *name;
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

struct iswi_tcp_config {
	const char *host;
	uint16_t port;
	const char *export_name;
	uint64_t export_bytes_min; /* a smaller export is refused */
	uint32_t depth;            /* requests on the wire at once; further ones wait in order */
	uint32_t connect_ms_max;   /* whole of connect and handshake */
	uint32_t request_ms_max;   /* per request, from submit */
	const char *thread_name;
	const struct iswi_clock *clock; /* for request_ms_max; borrowed; NULL: monotonic */
};

#define ISWI_TCP_DEPTH_MAX 4096

/*
 * Connects, shakes hands (NBD fixed newstyle, GO), starts the receiver thread. Blocking, for
 * connect_ms_max at most (looking up a host's name may add the resolver's own limit). config and
 * its strings are borrowed until it returns, *events is copied. Errors, apart from those of
 * connect(2):
 *
 *   -ENXIO         the host's name cannot be resolved
 *   -ECONNREFUSED  nothing listens there
 *   -ETIMEDOUT     no answer, or none that is NBD, within connect_ms_max
 *   -ECONNRESET    closed by the other side during the handshake
 *   -EPROTO        not an NBD server of this kind: another protocol on that port
 *   -ENOENT        no such export: the token is wrong or of an older epoch
 *   -EACCES        the server wants TLS, or forbids it by policy
 *   -ERANGE        the export is smaller than export_bytes_min
 *   -EROFS         the export is read-only
 *   -EOPNOTSUPP    the server cannot do what is needed (GO, 4 KiB blocks)
 *   -EINVAL        a mistake in config
 */
int iswi_tcp_connect(const struct iswi_tcp_config *config, const struct iswi_queue_events *events,
		     struct iswi_queue **queue_out, struct isw_error *error);

/*
 * A layer over another queue (taken: destroyed with it) that delays, fails, truncates or drops as
 * told. For tests. See fault.h.
 */
#endif
