/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One NBD server, used twice: by the donor's store (exports whose bytes lie in memory) and by the
 * nbd-socket front end (exports whose requests end later, on another thread). It listens, shakes
 * hands, checks every request against the export's bounds and answers; a backend says what the
 * exports are.
 *
 * Whoever serves a connection receives as much as there is, serves every complete request of it,
 * answers them with one gathered send, and only then waits again. A connection that breaks the
 * protocol is closed and counted; a request that is well-formed and wrong gets an error.
 *
 * Each connection comes with a thread, which shakes hands. With asynchronous exports that thread
 * serves it to its end. Memory-backed connections share a worker for each processor, once there
 * are more than a few of them (nbd_worker.c).
 */
#ifndef ISWI_NBD_SERVER_H
#define ISWI_NBD_SERVER_H

#include "util/util.h"

/* The payload that every NBD server is expected to take; a larger WRITE ends the connection. */
#define ISWI_NBD_PAYLOAD_BYTES_MAX (32u << 20)
/* What a client may say before GO. */
#define ISWI_NBD_OPTIONS_MAX      64u
#define ISWI_NBD_OPTION_BYTES_MAX 8192u
#define ISWI_NBD_LISTENERS_MAX    16u

struct iswi_nbd_conn;
struct iswi_nbd_server;

/* Relaxed: statistics. Requests answered with success, and the bytes they moved. */
struct iswi_nbd_counters {
	atomic_uint_fast64_t read_requests;
	atomic_uint_fast64_t write_requests;
	atomic_uint_fast64_t read_bytes;
	atomic_uint_fast64_t write_bytes;
};

/* What a connection is bound to by GO. */
struct iswi_nbd_export {
	uint64_t size_bytes;
	uint32_t block_bytes_min; /* a power of two; offsets and lengths are multiples of it */
	uint32_t block_bytes_preferred;
	uint32_t block_bytes_max;           /* READ and WRITE; at most ISWI_NBD_PAYLOAD_BYTES_MAX */
	void *handle;                       /* the backend's own */
	struct iswi_nbd_counters *counters; /* optional; borrowed until close */
};

/* A piece of memory that stays where and whose it is until released. */
struct iswi_nbd_hold {
	void *memory;
	void *cookie; /* the backend's own */
};

/*
 * A request of an asynchronous export. The backend owns it, data included: it is made before
 * serving, lent out by take and comes back by give.
 */
struct iswi_nbd_request {
	/* Set by the backend once. */
	void *data; /* block_bytes_max bytes */
	/* Set by the server before submit. */
	uint16_t command; /* NBD_CMD_* */
	uint16_t flags;   /* NBD_CMD_FLAG_* */
	uint32_t length;
	uint64_t offset;
	/* The server's own. */
	uint64_t cookie;
	int error;
	struct iswi_nbd_conn *conn;
	struct iswi_nbd_request *next;
};

/*
 * What the exports are. Memory-backed: hold and release. Asynchronous: take, submit, give, crowds.
 * Exactly one of the two sets is there. ctx is iswi_nbd_server_config.ctx. Unless it says
 * otherwise a member is called on the thread that serves the connection, with no lock of the server
 * held. Of a memory-backed server that thread serves others too: nobody holds a lock that hold,
 * release or close takes while waiting for a connection to end.
 */
struct iswi_nbd_backend {
	/* Optional: the name that LIST shows. NULL: LIST answers an empty list, names are secrets.
	 */
	const char *listed;
	/*
	 * Required, may block. Looks the export up and binds conn to it; close follows exactly
	 * once. conn NULL: only describes it, no close follows. -ENOENT: no such export; -EMFILE:
	 * too many connections; -ESHUTDOWN. From here to close the backend may call
	 * iswi_nbd_conn_shutdown(conn). name is name_bytes long, not terminated.
	 */
	int (*open)(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		    struct iswi_nbd_export *export_out);
	/*
	 * Optional, of asynchronous exports; does not block. Called when no further request will be
	 * received on the connection. close follows when the requests under way have ended, which
	 * may take long.
	 */
	void (*ending)(void *ctx, struct iswi_nbd_export *export);
	/* Required, may block: every request and hold of the connection has ended. */
	void (*close)(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn);

	/*
	 * Does not block. Memory behind [offset, offset + length), which the server has checked
	 * against the export's size. An error is the request's answer.
	 */
	int (*hold)(struct iswi_nbd_export *export, uint64_t offset, uint32_t length,
		    struct iswi_nbd_hold *hold_out);
	/* Does not block. */
	void (*release)(struct iswi_nbd_export *export, struct iswi_nbd_hold *hold);

	/* May block until a request is given back. Never fails. */
	struct iswi_nbd_request *(*take)(struct iswi_nbd_export *export);
	/*
	 * Does not block; called under the connection's gate. iswi_nbd_complete follows exactly
	 * once, on any thread. Of two requests for one page the one submitted later wins.
	 */
	void (*submit)(struct iswi_nbd_export *export, struct iswi_nbd_request *request);
	/* Any thread, does not block: the answer was sent or dropped. */
	void (*give)(struct iswi_nbd_export *export, struct iswi_nbd_request *request);
	/*
	 * Optional. Any thread, does not block: the connection has more requests than others leave
	 * it. The server ends it when its client does not take answers until it has not.
	 */
	bool (*crowds)(struct iswi_nbd_export *export);
};

struct iswi_nbd_server_config {
	const struct iswi_nbd_backend *backend; /* borrowed */
	void *ctx;
	uint32_t connections_max;
	/* TCP: so many of one host past GO, and as many before; 0: only the limit of all */
	uint32_t connections_per_host_max;
	uint32_t handshake_ms_max; /* from accept to GO */
	/*
	 * For asynchronous exports. A client that shuts a connection down sends the requests in
	 * flight there again on another one. From then on no request of the first is submitted.
	 */
	bool fenced;
	/*
	 * For memory-backed exports: up to so many connections keep the threads they came with. If
	 * there are more, workers serve them all.
	 */
	uint32_t lone_threads_max;
	bool urgent; /* who waits for an answer may wait for memory: iswi_thread_urgent() */
	/*
	 * An answer that moves no byte for this long; answers that still wait for a slow client
	 * this long after it was found to crowd others; a request, header and payload, that is not
	 * there entirely this long after its first byte.
	 */
	uint32_t send_ms_max;
};

struct iswi_nbd_server_stats {
	uint64_t connections;
	uint64_t connections_refused;
	uint64_t read_requests;
	uint64_t write_requests;
	uint64_t read_bytes;
	uint64_t write_bytes;
	uint64_t request_errors;
	uint64_t protocol_errors;
};

int iswi_nbd_server_create(const struct iswi_nbd_server_config *config,
			   struct iswi_nbd_server **server_out, struct isw_error *error);
/* Control thread: serving starts at once. port 0: any free one; *port_out is the bound port. */
int iswi_nbd_server_listen_tcp(struct iswi_nbd_server *server, const char *host, uint16_t port,
			       uint16_t *port_out, struct isw_error *error);
/* A socket left behind by a dead process is replaced; a live one is -EADDRINUSE. Mode 0600. */
int iswi_nbd_server_listen_unix(struct iswi_nbd_server *server, const char *path,
				struct isw_error *error);
/*
 * Control thread: serves the default export to a client that is in transmission already. Takes fd,
 * a stream socket, also when it fails.
 */
int iswi_nbd_server_connected(struct iswi_nbd_server *server, int fd, struct isw_error *error);
/*
 * Control thread, blocks: accepts no more, shuts every connection down, joins every thread,
 * frees. NULL is fine.
 */
void iswi_nbd_server_destroy(struct iswi_nbd_server *server);
void iswi_nbd_server_stats(struct iswi_nbd_server *server, struct iswi_nbd_server_stats *stats_out);

/*
 * Any thread, does not wait, takes no lock: the connection serves no further request and
 * ends soon. Only between open and close.
 */
void iswi_nbd_conn_shutdown(struct iswi_nbd_conn *conn);
/* Any thread, does not wait. error: 0 or -errno. The request belongs to the server until give. */
void iswi_nbd_complete(struct iswi_nbd_request *request, int error);

#endif
