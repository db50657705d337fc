// SPDX-License-Identifier: Apache-2.0
/*
 * Workers: a few threads that serve all connections of a memory-backed server. Each has an epoll
 * set, level-triggered, and gives a turn (nbd_memory.c) to every connection whose socket is ready,
 * which has more to do, or whose client is late. It waits for nothing else: with server->lock and
 * a backend's locks held nobody waits for a worker.
 */
#define _GNU_SOURCE 1
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "wire/nbd_conn.h"

#define EVENTS_MAX 64 /* taken from the epoll set at once */

/* ---- lists: rings that begin and end at their owner's link */

static void ring_init(struct iswi_nbd_link *ring)
{
	ring->prev = ring->next = ring;
}

static bool ring_is_empty(const struct iswi_nbd_link *ring)
{
	return ring->next == ring;
}

static void ring_append(struct iswi_nbd_link *ring, struct iswi_nbd_link *link)
{
	link->prev = ring->prev;
	link->next = ring;
	ring->prev->next = link;
	ring->prev = link;
}

/* Nothing happens to a link that is in no ring. */
static void ring_remove(struct iswi_nbd_link *link)
{
	if (link->next == NULL)
		return;
	link->prev->next = link->next;
	link->next->prev = link->prev;
	link->next = NULL;
}

static void make_ready(struct iswi_nbd_worker *worker, struct iswi_nbd_conn *conn)
{
	if (conn->ready.next == NULL)
		ring_append(&worker->ready, &conn->ready);
}

/* ---- the thread's part */

/*
 * All deadlines lie equally far ahead when they are set, which happens in the turn before this
 * call: appended, each has its place.
 */
static void keep_deadline(struct iswi_nbd_worker *worker, struct iswi_nbd_conn *conn)
{
	if (conn->waiting_ns == conn->memory.deadline_ns)
		return;
	ring_remove(&conn->waiting);
	conn->waiting_ns = conn->memory.deadline_ns;
	if (conn->waiting_ns != 0)
		ring_append(&worker->waiting, &conn->waiting);
}

static int watch(struct iswi_nbd_worker *worker, struct iswi_nbd_conn *conn, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = conn};

	if (conn->watched == events)
		return 0;
	conn->watched = events;
	return epoll_ctl(worker->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event) == 0 ? 0 : -errno;
}

static void end(struct iswi_nbd_worker *worker, struct iswi_nbd_conn *conn, int err)
{
	ring_remove(&conn->waiting);
	/*
	 * Closing alone does not take it out while a process that is being started still has a
	 * copy of the descriptor.
	 */
	epoll_ctl(worker->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
	iswi_nbd_memory_end(conn);
	iswi_nbd_conn_ended(conn, err);
}

static void give_turn(struct iswi_nbd_worker *worker, struct iswi_nbd_conn *conn)
{
	int result = iswi_nbd_memory_turn(conn, MSG_DONTWAIT);

	if (result == ISWI_NBD_GOES_ON)
		make_ready(worker, conn);
	else if (result > 0)
		result = watch(worker, conn, result == ISWI_NBD_WAITS_IN ? EPOLLIN : EPOLLOUT);
	if (result < 0)
		end(worker, conn, result);
	else
		keep_deadline(worker, conn);
}

/* Those that become ready meanwhile have their turn after the sockets were looked at. */
static void give_turns(struct iswi_nbd_worker *worker)
{
	const struct iswi_nbd_link *last = worker->ready.prev;
	bool more = !ring_is_empty(&worker->ready);

	while (more) {
		struct iswi_nbd_link *link = worker->ready.next;

		more = link != last;
		ring_remove(link);
		give_turn(worker, ISWI_CONTAINER(link, struct iswi_nbd_conn, ready));
	}
}

/* Of a client that is late the turn makes an end. */
static void look_for_late(struct iswi_nbd_worker *worker)
{
	const struct iswi_nbd_link *ring = &worker->waiting;

	while (!ring_is_empty(ring)) {
		struct iswi_nbd_conn *conn =
			ISWI_CONTAINER(ring->next, struct iswi_nbd_conn, waiting);

		if (conn->waiting_ns > iswi_now_ns())
			return;
		ring_remove(&conn->waiting);
		conn->waiting_ns = 0;
		make_ready(worker, conn);
	}
}

/* How long epoll may wait. */
static int wait_ms(const struct iswi_nbd_worker *worker)
{
	const struct iswi_nbd_conn *first;
	uint64_t now_ns;

	if (!ring_is_empty(&worker->ready))
		return 0;
	if (ring_is_empty(&worker->waiting))
		return -1;
	first = ISWI_CONTAINER(worker->waiting.next, struct iswi_nbd_conn, waiting);
	now_ns = iswi_now_ns();
	if (first->waiting_ns <= now_ns)
		return 0;
	return (int)((first->waiting_ns - now_ns + 999999u) / 1000000u);
}

static bool is_done(struct iswi_nbd_worker *worker)
{
	bool done;

	if (!worker->stopping)
		return false;
	pthread_mutex_lock(&worker->server->hand_lock);
	done = worker->conn_count == 0;
	pthread_mutex_unlock(&worker->server->hand_lock);
	return done;
}

static void *worker_main(void *opaque)
{
	struct iswi_nbd_worker *worker = opaque;
	struct epoll_event events[EVENTS_MAX];

	if (worker->server->config.urgent)
		iswi_thread_urgent();
	while (!is_done(worker)) {
		/* Fails only when a signal comes, and these threads take none. */
		int count = epoll_wait(worker->epoll_fd, events, EVENTS_MAX, wait_ms(worker));

		for (int i = 0; i < count; i++) {
			if (events[i].data.ptr != NULL) {
				make_ready(worker, events[i].data.ptr);
				continue;
			}
			worker->stopping = true;
			epoll_ctl(worker->epoll_fd, EPOLL_CTL_DEL, worker->server->workers_stop_fd,
				  NULL);
		}
		look_for_late(worker);
		give_turns(worker);
	}
	return NULL;
}

/* ---- the server's part */

static uint32_t processors(void)
{
	cpu_set_t set;

	/* More of them than the set has room for, or it cannot be told: enough for all workers. */
	if (sched_getaffinity(0, sizeof(set), &set) != 0)
		return ISWI_NBD_WORKERS_MAX;
	return ISWI_MIN((uint32_t)CPU_COUNT(&set), ISWI_NBD_WORKERS_MAX);
}

static int start(struct iswi_nbd_server *server, struct iswi_nbd_worker *worker)
{
	struct epoll_event stop = {.events = EPOLLIN, .data.ptr = NULL};
	int err;

	worker->server = server;
	ring_init(&worker->ready);
	ring_init(&worker->waiting);
	worker->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (worker->epoll_fd < 0)
		return -errno;
	err = epoll_ctl(worker->epoll_fd, EPOLL_CTL_ADD, server->workers_stop_fd, &stop) == 0
		      ? iswi_thread_start(&worker->thread, "isw-nbd-worker", worker_main, worker)
		      : -errno;
	if (err != 0)
		close(worker->epoll_fd);
	return err;
}

static int start_all(struct iswi_nbd_server *server)
{
	const uint32_t wanted = processors();
	int err = 0;

	server->workers_stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (server->workers_stop_fd < 0)
		return -errno;
	while (err == 0 && server->worker_count < wanted) {
		err = start(server, &server->workers[server->worker_count]);
		server->worker_count += err == 0;
	}
	if (err != 0)
		iswi_nbd_workers_end(server);
	return err;
}

int iswi_nbd_workers_start(struct iswi_nbd_server *server, struct isw_error *error)
{
	int err;

	if (server->config.backend->hold == NULL || server->worker_count > 0)
		return 0;
	err = start_all(server);
	if (err != 0)
		return iswi_error(error, err,
				  "the threads that serve connections could not be started: %s",
				  strerror(-err));
	return 0;
}

void iswi_nbd_workers_end(struct iswi_nbd_server *server)
{
	const uint64_t one = 1;
	ssize_t done;

	if (server->workers_stop_fd < 0)
		return;
	done = write(server->workers_stop_fd, &one, sizeof(one));
	(void)done; /* cannot be refused: the counter is far from its end */
	for (uint32_t i = 0; i < server->worker_count; i++) {
		pthread_join(server->workers[i].thread, NULL);
		close(server->workers[i].epoll_fd);
	}
	server->worker_count = 0;
	close(server->workers_stop_fd);
	server->workers_stop_fd = -1;
}

bool iswi_nbd_worker_take(struct iswi_nbd_conn *conn)
{
	struct iswi_nbd_server *server = conn->server;
	struct iswi_nbd_worker *worker = &server->workers[0];
	/*
	 * A socket can be written to at once, mostly. So the first turn does not wait for a
	 * request: what came right behind the handshake is in rx already.
	 */
	struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = conn};
	const uint64_t deadline_ns = conn->memory.deadline_ns;

	if (server->worker_count == 0)
		return false;
	for (uint32_t i = 1; i < server->worker_count; i++)
		if (server->workers[i].conn_count < worker->conn_count)
			worker = &server->workers[i];
	conn->watched = event.events;
	/* The worker sets its own, so that its list stays in order. */
	conn->memory.deadline_ns = 0;
	if (epoll_ctl(worker->epoll_fd, EPOLL_CTL_ADD, conn->fd, &event) != 0) {
		conn->memory.deadline_ns = deadline_ns;
		return false;
	}
	conn->worker = worker;
	worker->conn_count++;
	return true;
}
