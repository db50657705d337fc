// SPDX-License-Identifier: Apache-2.0
/* A connection's life: bounded, started, counted, joined. It comes from nbd_listen.c. */
#define _GNU_SOURCE 1
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "wire/nbd_conn.h"

/* A consumer whose host died must not keep its lease: found out within about 30 s. */
#define KEEPALIVE_IDLE_S     15
#define KEEPALIVE_INTERVAL_S 5
#define KEEPALIVE_PROBES     3

static int open_default(struct iswi_nbd_conn *conn)
{
	const struct iswi_nbd_server_config *config = &conn->server->config;

	return config->backend->open(config->ctx, "", 0, conn, &conn->export);
}

int iswi_nbd_conn_open(struct iswi_nbd_conn *conn)
{
	int err = conn->in_transmission ? open_default(conn) : iswi_nbd_handshake(conn);

	if (err == 0)
		conn->handshake_end_ns = 0;
	else
		iswi_nbd_conn_count(conn->server, err, false);
	return err;
}

/* A mapping of its own: freed, it is the host's again, which a heap full of gaps would keep. */
static struct iswi_nbd_conn *conn_alloc(void)
{
	void *memory = mmap(NULL, sizeof(struct iswi_nbd_conn), PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return NULL;
	/* Of the front end nbd-socket it has pages in clear. */
	(void)madvise(memory, sizeof(struct iswi_nbd_conn), MADV_DONTDUMP);
	return memory;
}

/*
 * server->hand_lock held: the calling thread ends, and has no connection in conns any longer.
 * Returns the one that ended before, to be joined when the lock is free: so one stack at most waits
 * to be freed.
 */
static struct iswi_nbd_ended thread_ends(struct iswi_nbd_server *server)
{
	struct iswi_nbd_ended before = server->ended;

	server->ended = (struct iswi_nbd_ended){.any = true, .thread = pthread_self()};
	return before;
}

/*
 * Whether a worker has the connection from here on. A worker waits for its sockets before it
 * receives, which a lone reader would notice: so a few connections keep the threads they came with.
 * One whose client is late ends where it is: a worker would give the client more time.
 */
static bool hand_over(struct iswi_nbd_conn *conn, struct iswi_nbd_ended *before_out)
{
	struct iswi_nbd_server *server = conn->server;
	bool taken;

	if (conn->memory.deadline_ns != 0 && iswi_now_ns() >= conn->memory.deadline_ns)
		return false;
	pthread_mutex_lock(&server->hand_lock);
	/* A server that stops joins the threads of the connections that it finds in conns. */
	taken = !server->stopping &&
		atomic_load_explicit(&server->conn_count, memory_order_relaxed) >
			server->config.lone_threads_max &&
		iswi_nbd_worker_take(conn);
	if (taken)
		*before_out = thread_ends(server);
	pthread_mutex_unlock(&server->hand_lock);
	return taken;
}

/* false: a worker goes on with the connection, which may be gone already. */
static bool serve_memory(struct iswi_nbd_conn *conn, struct iswi_nbd_ended *before_out)
{
	int result;

	iswi_nbd_memory_begin(conn);
	do {
		if (hand_over(conn, before_out))
			return false;
		result = iswi_nbd_memory_turn(conn, 0);
	} while (result > 0);
	iswi_nbd_memory_end(conn);
	iswi_nbd_conn_close(conn, result);
	return true;
}

/* Likewise. */
static bool serve(struct iswi_nbd_conn *conn, struct iswi_nbd_ended *before_out)
{
	const struct iswi_nbd_server_config *config = &conn->server->config;
	/* For a request half there; between requests a client may be silent for ever. */
	int err = iswi_nbd_set_timeout(conn->fd, SO_RCVTIMEO,
				       (uint64_t)config->send_ms_max * 1000000u);

	if (err == 0 && config->backend->hold != NULL)
		return serve_memory(conn, before_out);
	if (err == 0)
		err = iswi_nbd_async_serve(conn);
	iswi_nbd_conn_close(conn, err);
	return true;
}

static void *conn_main(void *opaque)
{
	struct iswi_nbd_conn *conn = opaque;
	struct iswi_nbd_server *server = conn->server;
	struct iswi_nbd_ended before = {.any = false};
	bool left;

	if (server->config.urgent)
		iswi_thread_urgent();
	if (iswi_nbd_conn_open(conn) != 0 || serve(conn, &before)) {
		pthread_mutex_lock(&server->lock);
		left = iswi_nbd_conn_leave(conn);
		if (left) {
			pthread_mutex_lock(&server->hand_lock);
			before = thread_ends(server);
			pthread_mutex_unlock(&server->hand_lock);
		}
		pthread_mutex_unlock(&server->lock);
		if (left)
			iswi_nbd_conn_free(conn);
	}
	if (before.any)
		pthread_join(before.thread, NULL);
	return NULL;
}

/* Best effort: on a Unix socket the TCP options do not exist. */
static void set_options(struct iswi_nbd_server *server, int fd)
{
	const int on = 1, idle_s = KEEPALIVE_IDLE_S, interval_s = KEEPALIVE_INTERVAL_S;
	const int probes = KEEPALIVE_PROBES;

	iswi_nbd_set_timeout(fd, SO_SNDTIMEO, (uint64_t)server->config.send_ms_max * 1000000u);
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

void iswi_nbd_conn_init(struct iswi_nbd_conn *conn, struct iswi_nbd_server *server, int fd)
{
	/* Not all of it: what is received first lands in rx, what is sent first in the union. */
	memset(conn, 0, offsetof(struct iswi_nbd_conn, memory));
	conn->rx_head = conn->rx_tail = 0;
	conn->server = server;
	conn->fd = fd;
	atomic_init(&conn->closing, false);
	conn->handshake_end_ns =
		iswi_now_ns() + (uint64_t)server->config.handshake_ms_max * 1000000u;
}

/* Takes fd, when it fails, too. */
static int add_conn(struct iswi_nbd_server *server, int fd, const unsigned char *peer,
		    bool in_transmission)
{
	struct iswi_nbd_conn **place, *conn;
	int err = -EMFILE;
	bool stranger;

	set_options(server, fd);
	pthread_mutex_lock(&server->lock);
	place = iswi_nbd_place(server, peer, &stranger);
	if (place == NULL)
		goto err_refused;
	err = -ENOMEM;
	conn = conn_alloc();
	if (conn == NULL)
		goto err_refused;
	iswi_nbd_conn_init(conn, server, fd);
	conn->in_transmission = in_transmission;
	if (peer != NULL)
		memcpy(conn->peer, peer, PEER_BYTES);
	conn->place = place;
	conn->number = ++server->conn_last;
	conn->stranger = stranger;
	/* Before it starts: how many there are tells the thread who serves it. */
	server->conn_count++;
	/* Started under the lock: the thread cannot end before conn->thread is written. */
	err = iswi_thread_start(&conn->thread, "isw-nbd-conn", conn_main, conn);
	if (err != 0)
		goto err_conn;
	*place = conn;
	pthread_mutex_unlock(&server->lock);
	return 0;

err_conn:
	server->conn_count--;
	iswi_nbd_conn_free(conn);
err_refused:
	pthread_mutex_unlock(&server->lock);
	iswi_count(&server->connections_refused, 1);
	close(fd);
	return err;
}

void iswi_nbd_server_add(struct iswi_nbd_server *server, int fd, const unsigned char *peer)
{
	add_conn(server, fd, peer, false);
}

int iswi_nbd_server_connected(struct iswi_nbd_server *server, int fd, struct isw_error *error)
{
	int err = add_conn(server, fd, NULL, true);

	if (err != 0)
		return iswi_error(error, err, "a connection could not be served: %s",
				  strerror(-err));
	return 0;
}

void iswi_nbd_conns_end(struct iswi_nbd_server *server)
{
	pthread_mutex_lock(&server->lock);
	pthread_mutex_lock(&server->hand_lock);
	server->stopping = true;
	pthread_mutex_unlock(&server->hand_lock);
	for (uint32_t i = 0; i < server->config.connections_max; i++)
		if (server->conns[i] != NULL)
			iswi_nbd_conn_shutdown(server->conns[i]);
	pthread_mutex_unlock(&server->lock);
	iswi_nbd_workers_end(server);
	/* Threads that left conns before join each other, but for the last of them. */
	if (server->ended.any)
		pthread_join(server->ended.thread, NULL);
	for (uint32_t i = 0; i < server->config.connections_max; i++) {
		if (server->conns[i] == NULL)
			continue;
		if (server->conns[i]->worker == NULL)
			pthread_join(server->conns[i]->thread, NULL);
		iswi_nbd_conn_free(server->conns[i]);
	}
}
