/* SPDX-License-Identifier: Apache-2.0 */
/* The server core's inside: shared by csrc/wire/nbd_*.c and by nothing else. */
#ifndef ISWI_NBD_CONN_H
#define ISWI_NBD_CONN_H

#include <sys/uio.h>

#include "wire/nbd.h"
#include "wire/nbd_server.h"

#define RX_BYTES      65536u /* received ahead of what is being served */
#define BATCH_REPLIES 64u    /* answered with one gathered send */
#define PEER_BYTES    16u    /* an address */

/* Answers collected by the connection's thread, sent together; memory-backed exports only. */
struct iswi_nbd_batch {
	unsigned count;
	unsigned iov_count;
	unsigned hold_count;
	struct iovec iov[2 * BATCH_REPLIES];
	struct iswi_nbd_hold holds[BATCH_REPLIES]; /* released when the last byte has left */
	unsigned char heads[BATCH_REPLIES][NBD_SIMPLE_REPLY_BYTES];
	/* Counted when the batch is sent. */
	uint64_t reads;
	uint64_t read_bytes;
};

/*
 * Answers of an asynchronous export. Whoever completes a request while nobody sends becomes the
 * sender, and takes along what others complete meanwhile. When the socket is full the sending is
 * handed to a thread that may wait: a completing thread never does.
 */
struct iswi_nbd_tx {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct iswi_nbd_request *first; /* completed, waiting to be sent */
	struct iswi_nbd_request **last;
	uint32_t in_flight; /* taken from the backend and not given back */
	bool sending;       /* somebody owns the fields below `batch` */
	bool handed_over;   /* ... and it is the waiting thread */
	bool ending;

	struct iswi_nbd_request *batch;
	unsigned iov_count;
	unsigned iov_sent;
	struct iovec iov[2 * BATCH_REPLIES];
	unsigned char heads[BATCH_REPLIES][NBD_SIMPLE_REPLY_BYTES];
	pthread_t waiter;
	/*
	 * Held while a request is submitted, and by whoever finds this connection dead: see
	 * nbd_fence.c. Taken before `lock`.
	 */
	pthread_mutex_t gate;
	bool shut; /* gate: no request of this connection is submitted from now on */
	/*
	 * The client is gone: answers are dropped. Relaxed, a hint only. Not beside the fields
	 * under the lock, of which a compiler may load several at once.
	 */
	atomic_bool broken;
};

struct iswi_nbd_conn {
	struct iswi_nbd_server *server;
	pthread_t thread;
	struct iswi_nbd_conn **place; /* in server->conns */
	int fd;                       /* written by the own thread under server->lock */
	/*
	 * Set by iswi_nbd_conn_shutdown before it shuts the socket, read by the connection's
	 * thread before each request: requests received earlier are not served.
	 */
	atomic_bool closing;
	bool no_zeroes;
	bool in_transmission; /* it came after its handshake */
	/* What was received so far, in receives; and when the others were last looked at. */
	uint64_t received;
	uint64_t looked;
	struct iswi_nbd_conn *fence_next; /* server->fence_lock */
	/* The client's address, an IPv4 one mapped to IPv6; zeros on a Unix socket. */
	unsigned char peer[PEER_BYTES];
	uint64_t handshake_end_ns; /* 0: past GO */
	struct iswi_nbd_export export;
	union {
		struct iswi_nbd_batch batch;
		struct iswi_nbd_tx tx;
	};
	size_t rx_head; /* rx[rx_head..rx_tail) was received and not served */
	size_t rx_tail;
	unsigned char rx[RX_BYTES];
};

/*
 * Locks: `lock` is taken last of all; nothing is called with it held. A backend's locks and
 * iswi_nbd_tx.lock are never held together with it. fence_lock comes before the gates, a gate
 * before what submitting takes; nobody holds a gate and asks for fence_lock.
 */
struct iswi_nbd_server {
	struct iswi_nbd_server_config config;
	/* conns, conn_count, each conn's fd, and what follows up to has_ended */
	pthread_mutex_t lock;
	struct iswi_nbd_conn **conns; /* NULL: the place is free */
	uint32_t conn_count;          /* whose thread still serves */
	bool stopping;                /* set once: destroy joins the threads of all conns */
	bool has_ended;
	pthread_t ended; /* the last thread that has left conns; it is joined by the next */
	int stop_fd;     /* eventfd: readable when the listeners must end */
	struct iswi_nbd_listener {
		struct iswi_nbd_server *server;
		pthread_t thread;
		int fd;
		char *path; /* of a Unix socket, to unlink */
	} listeners[ISWI_NBD_LISTENERS_MAX];
	uint32_t listener_count;
	/* Those of a fenced server that serve requests; taken before a connection's gate. */
	pthread_mutex_t fence_lock;
	struct iswi_nbd_conn *fence_members;
	struct iswi_nbd_counters counters;
	atomic_uint_fast64_t connections_refused; /* relaxed: statistics, like the next two */
	atomic_uint_fast64_t request_errors;
	atomic_uint_fast64_t protocol_errors;
};

/*
 * ---- nbd_conn.c. Takes fd: served in a thread of its own, or closed and counted. peer:
 * PEER_BYTES, copied; NULL on a Unix socket.
 */
void iswi_nbd_server_add(struct iswi_nbd_server *server, int fd, const unsigned char *peer);
/* For a new connection, which the caller has allocated. */
void iswi_nbd_conn_init(struct iswi_nbd_conn *conn, struct iswi_nbd_server *server, int fd);
/* Shakes hands and serves until the connection ends; fd stays open. */
void iswi_nbd_conn_run(struct iswi_nbd_conn *conn);
/* Shuts every connection down and joins its thread. None can be added meanwhile. */
void iswi_nbd_conns_end(struct iswi_nbd_server *server);

/* ---- nbd_listen.c. Ends and joins the listeners. */
void iswi_nbd_server_unlisten(struct iswi_nbd_server *server);

/* ---- nbd_io.c: all return 0 or -errno; -ENODATA: the client closed. */

/* Until at least `bytes` (at most RX_BYTES) lie in rx. */
int iswi_nbd_rx_need(struct iswi_nbd_conn *conn, size_t bytes);
/* Takes bytes out of rx, then straight from the socket. */
int iswi_nbd_rx_copy(struct iswi_nbd_conn *conn, void *data, size_t bytes);
int iswi_nbd_rx_skip(struct iswi_nbd_conn *conn, size_t bytes);
/* Everything, waiting at most send_ms_max for each progress. Changes iov. */
int iswi_nbd_send_all(struct iswi_nbd_conn *conn, struct iovec *iov, unsigned iov_count);
int iswi_nbd_set_timeout(int fd, int option, uint64_t ns);
/* Drops `bytes` from the front; returns how many entries are used up entirely. */
unsigned iswi_nbd_iov_advance(struct iovec *iov, unsigned iov_count, size_t bytes);

static inline size_t iswi_nbd_rx_available(const struct iswi_nbd_conn *conn)
{
	return conn->rx_tail - conn->rx_head;
}

/* ---- nbd_handshake.c: 0 when conn->export is open and requests follow. */
int iswi_nbd_handshake(struct iswi_nbd_conn *conn);

/* ---- nbd_fence.c */

/* Around the serving of requests; conn->tx is there. */
void iswi_nbd_fence_join(struct iswi_nbd_conn *conn);
void iswi_nbd_fence_leave(struct iswi_nbd_conn *conn);
/* Submits the request; false: the connection was found dead, and the request was not. */
bool iswi_nbd_fence_submit(struct iswi_nbd_conn *conn, struct iswi_nbd_request *request);

/* ---- nbd_request.c */

/* 0, or the error the request is answered with. */
int iswi_nbd_check(const struct iswi_nbd_export *export, const struct nbd_request *request);
/* Takes the request at the head of rx, which is there entirely. -ENODATA: DISC. */
int iswi_nbd_next(struct iswi_nbd_conn *conn, struct nbd_request *request);
/*
 * ---- nbd_memory.c, nbd_async.c, one for each sort of backend. Serves until the connection ends;
 * never returns 0. -ENODATA and -ESHUTDOWN are ordinary ends, -EPROTO is the client's fault.
 */
int iswi_nbd_memory_serve(struct iswi_nbd_conn *conn);
int iswi_nbd_async_serve(struct iswi_nbd_conn *conn);

#endif
