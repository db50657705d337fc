/* SPDX-License-Identifier: Apache-2.0 */
/* The server core's inside: shared by csrc/wire/nbd_*.c and by nothing else. */
#ifndef ISWI_NBD_CONN_H
#define ISWI_NBD_CONN_H

#include <sys/socket.h>
#include <sys/uio.h>

#include "wire/nbd.h"
#include "wire/nbd_server.h"

#define RX_BYTES      65536u /* received ahead of what is being served */
#define BATCH_REPLIES 64u    /* answered with one gathered send */
#define PEER_BYTES    16u    /* a host: see iswi_nbd_peer_of() */
/* Hosts that have opened an export lately. */
#define ISWI_NBD_KNOWN_MAX 256u

/* Each may serve any number of connections: more than processors would help little. */
#define ISWI_NBD_WORKERS_MAX 8u

/* Answers, collected and then sent together. */
struct iswi_nbd_batch {
	unsigned count;
	unsigned iov_count;
	unsigned iov_sent;
	unsigned hold_count;
	bool sending; /* nothing is added to it until all of it has left */
	/* Counted when it has. */
	uint64_t reads;
	uint64_t read_bytes;
	struct iovec iov[2 * BATCH_REPLIES];
	struct iswi_nbd_hold holds[BATCH_REPLIES]; /* released when the last byte has left */
	unsigned char heads[BATCH_REPLIES][NBD_SIMPLE_REPLY_BYTES];
};

enum iswi_nbd_stage {
	ISWI_NBD_NEXT,  /* the next request has not come, or not all of its header */
	ISWI_NBD_BEGIN, /* `request` was taken off the wire, and nothing was done for it */
	ISWI_NBD_LAND,  /* a WRITE's payload lands in `hold` */
	ISWI_NBD_SKIP,  /* a WRITE's payload lands nowhere */
	ISWI_NBD_ZERO,  /* `hold` is being zeroed */
	ISWI_NBD_LEAVE, /* DISC */
};

/* How far the serving of a memory-backed export is; for the thread that gives the turns. */
struct iswi_nbd_memory {
	enum iswi_nbd_stage stage;
	int error;                  /* what the request is answered with */
	uint32_t done;              /* bytes of the request, past BEGIN */
	struct nbd_request request; /* past NEXT */
	struct iswi_nbd_hold hold;  /* LAND and ZERO */
	uint64_t deadline_ns;       /* of what the client has to do; 0: nothing */
	struct iswi_nbd_batch batch;
};

/* A place in one of a worker's lists; next NULL: in none. */
struct iswi_nbd_link {
	struct iswi_nbd_link *prev, *next;
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
	pthread_t thread;               /* it came with; worker NULL: it still has it */
	struct iswi_nbd_worker *worker; /* server->hand_lock */
	struct iswi_nbd_conn **place;   /* in server->conns */
	int fd;                         /* written by who ends it, under server->lock */
	/* See nbd_places.c; under server->lock. */
	uint64_t number; /* of all, in their order */
	bool stranger;   /* of a host that had opened no export when it came */
	bool proved;     /* past GO */
	bool displaced;  /* shut down, as another one needed its place */
	/*
	 * Set by iswi_nbd_conn_shutdown before it shuts the socket, read before each request:
	 * requests received earlier are not served.
	 */
	atomic_bool closing;
	bool no_zeroes;
	bool in_transmission; /* it came after its handshake */
	/* What was received so far, in receives; and when the others were last looked at. */
	uint64_t received;
	uint64_t looked;
	struct iswi_nbd_conn *fence_next; /* server->fence_lock */
	/* Zeros on a Unix socket. */
	unsigned char peer[PEER_BYTES];
	uint64_t handshake_end_ns; /* 0: past GO */
	struct iswi_nbd_export export;
	/* The worker's own. */
	struct iswi_nbd_link ready;
	struct iswi_nbd_link waiting;
	uint64_t waiting_ns; /* memory.deadline_ns when it was put into the list */
	uint32_t watched;    /* EPOLL* */
	union {
		struct iswi_nbd_memory memory;
		struct iswi_nbd_tx tx;
	};
	size_t rx_head; /* rx[rx_head..rx_tail) was received and not served */
	size_t rx_tail;
	unsigned char rx[RX_BYTES];
};

/*
 * Locks: `lock` is taken last of all but hand_lock; nothing is called with them held. A backend's
 * locks and iswi_nbd_tx.lock are never held together with it. fence_lock comes before the gates, a
 * gate before what submitting takes; nobody holds a gate and asks for fence_lock.
 */
struct iswi_nbd_server {
	struct iswi_nbd_server_config config;
	/* What follows up to conn_count, each conn's fd, and what nbd_places.c needs of it. */
	pthread_mutex_t lock;
	struct iswi_nbd_conn **conns; /* NULL: the place is free */
	uint64_t conn_last;           /* the number of the latest */
	/* Broadcast: a connection has left conns. */
	pthread_cond_t left;
	/* until_ns 0: none. Zeros as peer: the place is free. */
	struct iswi_nbd_known {
		unsigned char peer[PEER_BYTES];
		uint64_t until_ns;
	} known[ISWI_NBD_KNOWN_MAX];
	atomic_uint conn_count; /* that have not ended; relaxed without the lock: a hint */
	/*
	 * What follows up to ended, worker of each conn, and conn_count of each worker. Taken
	 * after `lock`, and without it by a thread that hands its connection over: in a flood of
	 * new connections `lock` is busy, and a connection that is shut down must end soon.
	 */
	pthread_mutex_t hand_lock;
	bool stopping; /* set once: destroy frees all conns */
	struct iswi_nbd_ended {
		bool any;
		pthread_t thread;
	} ended;     /* the last thread that has left conns; it is joined by the next */
	int stop_fd; /* eventfd: readable when the listeners must end */
	struct iswi_nbd_listener {
		struct iswi_nbd_server *server;
		pthread_t thread;
		int fd;
		char *path; /* of a Unix socket, to unlink */
	} listeners[ISWI_NBD_LISTENERS_MAX];
	uint32_t listener_count;
	struct iswi_nbd_worker {
		struct iswi_nbd_server *server;
		pthread_t thread;
		int epoll_fd;
		uint32_t conn_count; /* hand_lock */
		/* Its thread's own. */
		bool stopping;
		struct iswi_nbd_link ready;   /* each has a turn next */
		struct iswi_nbd_link waiting; /* for their clients; the first deadline first */
	} workers[ISWI_NBD_WORKERS_MAX];
	uint32_t worker_count;
	int workers_stop_fd; /* eventfd: readable when the workers must end */
	/* Those of a fenced server that serve requests; taken before a connection's gate. */
	pthread_mutex_t fence_lock;
	struct iswi_nbd_conn *fence_members;
	struct iswi_nbd_counters counters;
	atomic_uint_fast64_t connections_refused; /* relaxed: statistics, like the next two */
	atomic_uint_fast64_t request_errors;
	atomic_uint_fast64_t protocol_errors;
};

/*
 * ---- nbd_listen.c. The host of an address, PEER_BYTES: IPv4 mapped to IPv6, of IPv6 the /64
 * network and the number of the link that it is of, and one for all of loopback. false: not of TCP.
 */
bool iswi_nbd_peer_of(const struct sockaddr_storage *address, unsigned char *peer);

/*
 * ---- nbd_conn.c. Takes fd: served in a thread of its own, or closed and counted. peer: of
 * iswi_nbd_peer_of(), copied; NULL on a Unix socket.
 */
void iswi_nbd_server_add(struct iswi_nbd_server *server, int fd, const unsigned char *peer);
/* For a new connection, which the caller has allocated. */
void iswi_nbd_conn_init(struct iswi_nbd_conn *conn, struct iswi_nbd_server *server, int fd);
/* Shakes hands. 0: the export is open, and requests follow. */
int iswi_nbd_conn_open(struct iswi_nbd_conn *conn);
/* Shuts every connection down and joins its thread. None can be added meanwhile. */
void iswi_nbd_conns_end(struct iswi_nbd_server *server);

/* ---- nbd_places.c */

/*
 * server->lock held, and dropped while a connection leaves for this one: a free place for a
 * connection of that host (NULL: of a Unix socket). NULL: there is none.
 */
struct iswi_nbd_conn **iswi_nbd_place(struct iswi_nbd_server *server, const unsigned char *peer,
				      bool *stranger_out);
/* The connection has opened an export, and keeps its place. false: it has lost it already. */
bool iswi_nbd_prove(struct iswi_nbd_conn *conn);

/* ---- nbd_end.c */

/* err: what ended the connection. served: after its handshake. */
void iswi_nbd_conn_count(struct iswi_nbd_server *server, int err, bool served);
/* Closes the export, and counts the end. */
void iswi_nbd_conn_close(struct iswi_nbd_conn *conn, int err);
/*
 * server->lock held; closes fd. true: the connection has left conns, and is to be freed when the
 * lock is free. false: the server stops, and frees what it finds in conns.
 */
bool iswi_nbd_conn_leave(struct iswi_nbd_conn *conn);
void iswi_nbd_conn_free(struct iswi_nbd_conn *conn);
/* All of that: of a worker's connection. */
void iswi_nbd_conn_ended(struct iswi_nbd_conn *conn, int err);

/* ---- nbd_listen.c. Ends and joins the listeners. */
void iswi_nbd_server_unlisten(struct iswi_nbd_server *server);

/* ---- nbd_io.c: all return 0 or -errno; -ENODATA: the client closed. */

/* Until at least `bytes` (at most RX_BYTES) lie in rx. */
int iswi_nbd_rx_need(struct iswi_nbd_conn *conn, size_t bytes);
/* Takes bytes out of rx, then straight from the socket. */
int iswi_nbd_rx_copy(struct iswi_nbd_conn *conn, void *data, size_t bytes);
int iswi_nbd_rx_skip(struct iswi_nbd_conn *conn, size_t bytes);
/* Takes up to `bytes` out of rx, and returns how many; data NULL: drops them. */
size_t iswi_nbd_rx_take(struct iswi_nbd_conn *conn, void *data, size_t bytes);
/*
 * One send of the first bytes_max (not 0) bytes at most; returns how many went or -errno, -EAGAIN
 * where it would have had to wait. flags: MSG_DONTWAIT or 0. iov is as before afterwards.
 */
ssize_t iswi_nbd_send_some(struct iswi_nbd_conn *conn, struct iovec *iov, unsigned iov_count,
			   size_t bytes_max, int flags);
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
 * ---- nbd_async.c. Serves until the connection ends; never returns 0. -ENODATA and -ESHUTDOWN are
 * ordinary ends, -EPROTO is the client's fault.
 */
int iswi_nbd_async_serve(struct iswi_nbd_conn *conn);

/* ---- nbd_memory.c */

/* What becomes of a memory-backed connection after a turn; the deadline is memory.deadline_ns. */
enum iswi_nbd_turn {
	ISWI_NBD_WAITS_IN = 1, /* for bytes, or the deadline */
	ISWI_NBD_WAITS_OUT,    /* for room in the socket, or the deadline */
	ISWI_NBD_GOES_ON,      /* it has had its share: others first */
};
/* Before the first turn, and after the last: what it holds is released. */
void iswi_nbd_memory_begin(struct iswi_nbd_conn *conn);
void iswi_nbd_memory_end(struct iswi_nbd_conn *conn);
/*
 * An enum iswi_nbd_turn, or what ends the connection, as above. flags: MSG_DONTWAIT, or 0 where
 * the turn may wait for the client.
 */
int iswi_nbd_memory_turn(struct iswi_nbd_conn *conn, int flags);

/* ---- nbd_worker.c: of a memory-backed server. Its lock is not held unless it says so. */
/* Control thread, before anybody connects: a second call, or of another server, does nothing. */
int iswi_nbd_workers_start(struct iswi_nbd_server *server, struct isw_error *error);
/* Every connection was shut down and none is taken: joins them when those they have are gone. */
void iswi_nbd_workers_end(struct iswi_nbd_server *server);
/*
 * server->hand_lock held; the export is open. true: a worker serves the connection from here on,
 * and frees it perhaps as soon as the lock is free.
 */
bool iswi_nbd_worker_take(struct iswi_nbd_conn *conn);

#endif
