/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The front end far: its life, its clients' lives, and the threads that look at their rings. The
 * control thread makes rings and ends clients; a thread for each kind of request takes what is
 * asked. Nothing here waits for a client.
 */
#define _GNU_SOURCE 1
#include "frontend/far.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "frontend/far_client.h"

#ifndef SO_PEERPIDFD /* Linux 6.5 */
#define SO_PEERPIDFD 77
#endif
#define FDS_MAX     2u
#define RETRY_MS    100
#define STAT_BYTES  1024u
#define STAT_FIELDS 20u /* from the state on, the start time is the 20th */

/* What an epoll event is about: the kind in the high half, an index in the low one. */
enum about {
	ABOUT_STOP,
	ABOUT_TOLD,
	ABOUT_AGAIN,
	ABOUT_JOB,
	ABOUT_SOCK,
	ABOUT_PROCESS,
	ABOUT_BELL
};

static int watch(int epoll, int fd, enum about about, uint32_t index)
{
	struct epoll_event event = {
		.events = EPOLLIN,
		.data.u64 = (uint64_t)about << 32 | index,
	};

	return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : -errno;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* ------------------------------------------------------------------- processes */

/* When the process started, in clock ticks since boot; 0: it cannot be told. */
static uint64_t started_of(pid_t pid)
{
	char path[32], stat[STAT_BYTES], *at;
	ssize_t got;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	got = read(fd, stat, sizeof(stat) - 1);
	close(fd);
	if (got <= 0)
		return 0;
	stat[got] = '\0';
	at = strrchr(stat, ')'); /* a name may have any character */
	for (uint32_t i = 0; at != NULL && i < STAT_FIELDS; i++)
		at = strchr(at + 1, ' ');
	return at == NULL ? 0 : strtoull(at, NULL, 10);
}

/* A descriptor of the process, if it is still the one that is meant. */
static int open_process(const struct iswi_far_kept_client *kept)
{
	int fd = (int)syscall(SYS_pidfd_open, kept->pid, 0);

	if (fd >= 0 && started_of(kept->pid) != kept->started)
		close_fd(&fd);
	return fd;
}

/*
 * A client gives us whatever it likes. Another kind of file is closed at once; its close may wait,
 * which holds up no more than other hellos.
 */
static bool is_userfaultfd(int fd)
{
	char path[32], target[64];
	ssize_t length;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	length = readlink(path, target, sizeof(target) - 1);
	if (length <= 0)
		return false;
	target[length] = '\0';
	return strcmp(target, "anon_inode:[userfaultfd]") == 0;
}

/* ------------------------------------------------------------------------ rings */

static int make_ring(struct iswf_ring **ring_out)
{
	int fd = memfd_create("infiniswap-far", MFD_CLOEXEC | MFD_ALLOW_SEALING), err;
	void *ring;

	if (fd < 0)
		return -errno;
	if (ftruncate(fd, ISWF_RING_BYTES) != 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
		goto err_fd;
	ring = mmap(NULL, ISWF_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
		    0);
	if (ring == MAP_FAILED)
		goto err_fd;
	/* As all of this process is locked where that is allowed, so is this. */
	(void)madvise(ring, ISWF_RING_BYTES, MADV_DONTDUMP);
	(void)madvise(ring, ISWF_RING_BYTES, MADV_DONTFORK);
	*ring_out = ring;
	return fd;

err_fd:
	err = -errno;
	close(fd);
	return err;
}

/* -------------------------------------------------------------------- clients */

static void set_live(struct far_client *client, bool live)
{
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		pthread_mutex_lock(&client->look_lock[kind]);
	client->live = live;
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		pthread_mutex_unlock(&client->look_lock[kind]);
}

static void drop_ring(struct far_client *client)
{
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		close_fd(&client->bell[kind]);
	if (client->ring != NULL)
		munmap(client->ring, ISWF_RING_BYTES);
	client->ring = NULL;
}

static void free_client(struct far_client *client)
{
	drop_ring(client);
	close_fd(&client->sock);
	close_fd(&client->pidfd);
	close_fd(&client->uffd); /* not before: its process may still miss pages */
	memset(&client->far->table.kept->clients[client->index], 0,
	       sizeof(struct iswi_far_kept_client));
	client->phase = ISWI_FAR_UNUSED;
}

/* None of its requests is under way, and nobody who ended one looks at it any more. */
static bool is_idle(struct far_client *client)
{
	bool idle;

	pthread_mutex_lock(&client->leave_lock);
	idle = client->in_flight == 0;
	pthread_mutex_unlock(&client->leave_lock);
	return idle;
}

static void set_ending(struct far_client *client, bool ending)
{
	pthread_mutex_lock(&client->leave_lock);
	client->ending = ending;
	pthread_mutex_unlock(&client->leave_lock);
}

/* The client's next step after its end, as far as it goes now. */
static void step(struct far_client *client)
{
	if (client->phase == ISWI_FAR_ENDING && is_idle(client)) {
		drop_ring(client);
		client->phase = ISWI_FAR_DISCARDING;
		client->discard_from = 0;
		atomic_store(&client->discarded, 0);
	}
	while (client->phase == ISWI_FAR_DISCARDING &&
	       atomic_load_explicit(&client->discarded, memory_order_acquire) != 1) {
		if (!iswi_far_discard_next(client))
			free_client(client);
		else if (atomic_load_explicit(&client->discarded, memory_order_acquire) < 0)
			break; /* tried again a while later */
	}
}

static void begin_end(struct far_client *client)
{
	if (client->phase != ISWI_FAR_LIVE && client->phase != ISWI_FAR_AWAITED)
		return;
	set_live(client, false);
	if (client->phase == ISWI_FAR_LIVE)
		atomic_fetch_sub_explicit(&client->far->clients_live, 1, memory_order_relaxed);
	client->phase = ISWI_FAR_ENDING;
	if (client->sock >= 0)
		(void)epoll_ctl(client->far->control_epoll, EPOLL_CTL_DEL, client->sock, NULL);
	if (client->pidfd >= 0)
		(void)epoll_ctl(client->far->control_epoll, EPOLL_CTL_DEL, client->pidfd, NULL);
	set_ending(client, true);
	step(client);
}

/* -------------------------------------------------------------------- hello */

struct newcomer {
	struct iswf_hello hello;
	int sock, uffd;
	pid_t pid;
	int pidfd;
};

/* Next hello on a job's socket: 1, 0 when there is none, -errno when there never will be. */
static int hear(int job, struct newcomer *newcomer)
{
	union {
		char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec data = {&newcomer->hello, sizeof(newcomer->hello)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct cmsghdr *part;
	int fds[FDS_MAX] = {-1, -1};
	ssize_t got = recvmsg(job, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (got < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	part = CMSG_FIRSTHDR(&message);
	if (part != NULL && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS)
		memcpy(fds, CMSG_DATA(part), ISWI_MIN(part->cmsg_len - CMSG_LEN(0), sizeof(fds)));
	newcomer->sock = fds[0];
	newcomer->uffd = fds[1];
	if (got == 0 && fds[0] < 0)
		return -EPIPE;
	if (got != (ssize_t)sizeof(newcomer->hello))
		newcomer->hello.magic = 0;
	return 1;
}

static void refuse(int sock, int code)
{
	const struct iswf_welcome welcome = {
		.magic = ISWF_MAGIC,
		.version = ISWF_VERSION,
		.refused = code,
	};

	(void)send(sock, &welcome, sizeof(welcome), MSG_DONTWAIT | MSG_NOSIGNAL);
}

static int welcome(struct far_client *client, int ring_fd)
{
	struct far *far = client->far;
	struct iswf_welcome text = {
		.magic = ISWF_MAGIC,
		.version = ISWF_VERSION,
		.client = client->index + 1,
		.blocks_max = far->table.blocks,
	};
	int fds[] = {ring_fd, client->bell[ISWF_KIND_READ], client->bell[ISWF_KIND_WRITE]};
	union {
		char bytes[CMSG_SPACE(sizeof(fds))];
		struct cmsghdr align;
	} control = {.bytes = {0}};
	struct iovec data = {&text, sizeof(text)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct cmsghdr *part = CMSG_FIRSTHDR(&message);

	memcpy(text.token, far->table.kept->clients[client->index].token, sizeof(text.token));
	part->cmsg_level = SOL_SOCKET;
	part->cmsg_type = SCM_RIGHTS;
	part->cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(part), fds, sizeof(fds));
	if (sendmsg(client->sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
		return -errno;
	return 0;
}

/* Process and number of who made the other end: what a socket of the kernel's says, not the client.
 */
static int know_peer(struct newcomer *newcomer)
{
	struct ucred peer;
	socklen_t bytes = sizeof(peer);

	if (getsockopt(newcomer->sock, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0)
		return -errno;
	bytes = sizeof(newcomer->pidfd);
	if (getsockopt(newcomer->sock, SOL_SOCKET, SO_PEERPIDFD, &newcomer->pidfd, &bytes) != 0) {
		newcomer->pidfd = -1;
		return -errno;
	}
	newcomer->pid = peer.pid;
	return 0;
}

static bool same_token(const uint8_t *a, const uint8_t *b)
{
	uint8_t differ = 0;

	for (uint32_t i = 0; i < ISWF_TOKEN_BYTES; i++)
		differ |= a[i] ^ b[i];
	return differ == 0;
}

/* Its place among the clients: a new one, or one that it had. NULL with *code_out. */
static struct far_client *find_client(struct far *far, const struct newcomer *newcomer,
				      int *code_out)
{
	const struct iswf_hello *hello = &newcomer->hello;
	struct far_client *client;

	if (hello->client != 0) {
		*code_out = -EINVAL;
		if (hello->client > ISWI_FAR_CLIENTS_MAX)
			return NULL;
		client = &far->clients[hello->client - 1];
		if (client->phase != ISWI_FAR_AWAITED ||
		    !same_token(hello->token, far->table.kept->clients[client->index].token))
			return NULL;
		return client;
	}
	*code_out = -ENOSPC;
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		if (far->clients[i].phase == ISWI_FAR_UNUSED)
			return &far->clients[i];
	return NULL;
}

/* A process that has executed another program, which says hello: its former memory is gone. */
static void end_former(struct far *far, pid_t pid)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		if (far->clients[i].phase == ISWI_FAR_LIVE &&
		    far->table.kept->clients[i].pid == pid)
			begin_end(&far->clients[i]);
}

static int keep_client(struct far_client *client, const struct newcomer *newcomer)
{
	struct iswi_far_kept_client *kept = &client->far->table.kept->clients[client->index];
	uint8_t token[ISWF_TOKEN_BYTES];

	if (getrandom(token, sizeof(token), 0) != (ssize_t)sizeof(token))
		return -EIO;
	kept->pid = newcomer->pid;
	kept->started = started_of(newcomer->pid);
	memcpy(kept->token, token, sizeof(token));
	kept->used = 1;
	return 0;
}

/* Takes the newcomer's descriptors, also after an error: then free_client closes them. */
static int begin_client(struct far_client *client, struct newcomer *newcomer)
{
	struct far *far = client->far;
	int ring_fd, code = 0;

	close_fd(&client->pidfd);
	client->sock = newcomer->sock;
	client->pidfd = newcomer->pidfd;
	client->uffd = newcomer->uffd;
	set_ending(client, false);
	for (uint32_t i = 0; i < ISWF_SLOTS; i++)
		atomic_store(&client->requests[i].taken, false);
	for (uint32_t kind = 0; kind < ISWF_KINDS && code == 0; kind++) {
		client->bell[kind] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		if (client->bell[kind] < 0)
			code = -errno;
		else
			code = watch(far->look_epoll[kind], client->bell[kind], ABOUT_BELL,
				     client->index);
	}
	if (code != 0)
		return code;
	ring_fd = make_ring(&client->ring);
	if (ring_fd < 0)
		return ring_fd;
	set_live(client, true);
	code = watch(far->control_epoll, client->sock, ABOUT_SOCK, client->index);
	if (code == 0)
		code = watch(far->control_epoll, client->pidfd, ABOUT_PROCESS, client->index);
	if (code == 0)
		code = welcome(client, ring_fd);
	close(ring_fd);
	return code;
}

static void close_newcomer(struct newcomer *newcomer)
{
	close_fd(&newcomer->sock);
	close_fd(&newcomer->uffd);
	close_fd(&newcomer->pidfd);
}

static int admit(struct far *far, struct newcomer *newcomer)
{
	const struct iswf_hello *hello = &newcomer->hello;
	struct far_client *client;
	int code = 0;

	if (hello->magic != ISWF_MAGIC || hello->version != ISWF_VERSION)
		return -EPROTO;
	if (newcomer->sock < 0 || newcomer->uffd < 0)
		return -EBADF;
	code = know_peer(newcomer);
	if (code != 0)
		return code;
	if (hello->client == 0)
		end_former(far, newcomer->pid);
	client = find_client(far, newcomer, &code);
	if (client == NULL)
		return code;
	code = is_userfaultfd(newcomer->uffd) ? 0 : -EBADF;
	if (code == 0 && hello->client == 0)
		code = keep_client(client, newcomer);
	if (code != 0)
		return code;
	client->phase = ISWI_FAR_LIVE;
	atomic_fetch_add_explicit(&far->clients_live, 1, memory_order_relaxed);
	code = begin_client(client, newcomer);
	if (code != 0) {
		refuse(client->sock, code);
		begin_end(client);
	}
	/* They are the client's now. */
	newcomer->sock = newcomer->uffd = newcomer->pidfd = -1;
	return 0;
}

static void greet(struct far *far, int job)
{
	for (;;) {
		struct newcomer newcomer = {.sock = -1, .uffd = -1, .pidfd = -1};
		int code = hear(job, &newcomer);

		if (code < 0) /* the job's last process has ended */
			close(job);
		if (code <= 0)
			return;
		code = admit(far, &newcomer);
		if (code != 0 && newcomer.sock >= 0)
			refuse(newcomer.sock, code);
		close_newcomer(&newcomer);
	}
}

/* -------------------------------------------------------------------- threads */

/* A socket says nothing after its hello: whatever happens there is its end. */
static void *control_main(void *arg)
{
	struct far *far = arg;
	struct epoll_event events[16];

	while (!atomic_load(&far->stopping)) {
		bool busy = false;
		int count;

		for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
			step(&far->clients[i]);
			busy |= far->clients[i].phase == ISWI_FAR_DISCARDING;
		}
		count = epoll_wait(far->control_epoll, events, ISWI_ARRAY_LEN(events),
				   busy ? RETRY_MS : -1);
		for (int i = 0; i < count; i++) {
			uint32_t index = (uint32_t)events[i].data.u64;

			switch ((enum about)(events[i].data.u64 >> 32)) {
			case ABOUT_TOLD:
				iswi_far_hear(far->told);
				break;
			case ABOUT_JOB:
				greet(far, (int)index);
				break;
			case ABOUT_SOCK:
			case ABOUT_PROCESS:
				begin_end(&far->clients[index]);
				break;
			default:
				break;
			}
		}
	}
	return NULL;
}

static void look_at_all(struct far *far, uint32_t kind)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		iswi_far_look(&far->clients[i], kind);
}

static void look_main(struct far *far, uint32_t kind)
{
	struct epoll_event events[16];

	while (!atomic_load(&far->stopping)) {
		int count = epoll_wait(far->look_epoll[kind], events, ISWI_ARRAY_LEN(events), -1);

		for (int i = 0; i < count; i++) {
			uint32_t index = (uint32_t)events[i].data.u64;

			switch ((enum about)(events[i].data.u64 >> 32)) {
			case ABOUT_AGAIN:
				iswi_far_hear(far->again);
				look_at_all(far, kind);
				break;
			case ABOUT_BELL:
				iswi_far_look(&far->clients[index], kind);
				break;
			default:
				break;
			}
		}
	}
}

static void *look_reads(void *far)
{
	look_main(far, ISWF_KIND_READ);
	return NULL;
}

static void *look_writes(void *far)
{
	look_main(far, ISWF_KIND_WRITE);
	return NULL;
}

/* ----------------------------------------------------------------------- life */

static int make_epoll(struct far *far, int *epoll_out)
{
	*epoll_out = epoll_create1(EPOLL_CLOEXEC);
	return *epoll_out < 0 ? -errno : watch(*epoll_out, far->stop, ABOUT_STOP, 0);
}

static int make_descriptors(struct far *far)
{
	int code = 0;

	far->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	far->told = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	far->again = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (far->stop < 0 || far->told < 0 || far->again < 0)
		return -errno;
	code = make_epoll(far, &far->control_epoll);
	for (uint32_t kind = 0; kind < ISWF_KINDS && code == 0; kind++)
		code = make_epoll(far, &far->look_epoll[kind]);
	if (code == 0)
		code = watch(far->control_epoll, far->told, ABOUT_TOLD, 0);
	if (code == 0)
		code = watch(far->look_epoll[ISWF_KIND_READ], far->again, ABOUT_AGAIN, 0);
	return code;
}

static int make_bounces(struct far *far)
{
	size_t bytes = (size_t)ISWI_FAR_BOUNCES * ISWF_BLOCK_BYTES;
	void *bounces = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (bounces == MAP_FAILED)
		return -errno;
	(void)madvise(bounces, bytes, MADV_DONTDUMP); /* pages in clear */
	(void)madvise(bounces, bytes, MADV_DONTFORK);
	far->bounces = bounces;
	for (uint32_t i = 0; i < ISWI_FAR_BOUNCES; i++)
		far->bounce_free[far->bounces_free++] =
			far->bounces + (uint64_t)i * ISWF_BLOCK_BYTES;
	return 0;
}

/* The clients of a predecessor that are still there come back; the blocks of the others go. */
static int await_clients(struct far *far)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		struct far_client *client = &far->clients[i];
		int code;

		if (far->table.kept->clients[i].used == 0)
			continue;
		client->phase = ISWI_FAR_AWAITED;
		client->pidfd = open_process(&far->table.kept->clients[i]);
		if (client->pidfd < 0) {
			begin_end(client);
			continue;
		}
		code = watch(far->control_epoll, client->pidfd, ABOUT_PROCESS, i);
		if (code != 0)
			return code;
	}
	return 0;
}

static int start_threads(struct far *far)
{
	static void *(*const mains[])(void *) = {control_main, look_reads, look_writes};
	static const char *const names[] = {"isw-far", "isw-far-reads", "isw-far-writes"};

	for (; far->threads_count < ISWI_ARRAY_LEN(mains); far->threads_count++) {
		int code = iswi_thread_start(&far->threads[far->threads_count],
					     names[far->threads_count], mains[far->threads_count],
					     far);

		if (code != 0)
			return code;
	}
	return 0;
}

static void init(struct far *far, isw_engine *engine, uint64_t offset)
{
	far->frontend.ops = &iswi_far_ops;
	far->engine = engine;
	far->offset = offset;
	far->stop = far->told = far->again = far->control_epoll = -1;
	pthread_mutex_init(&far->bounce_lock, NULL);
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		far->look_epoll[kind] = -1;
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		struct far_client *client = &far->clients[i];

		client->far = far;
		client->index = i;
		pthread_mutex_init(&client->leave_lock, NULL);
		client->sock = client->pidfd = client->uffd = -1;
		for (uint32_t kind = 0; kind < ISWF_KINDS; kind++) {
			client->bell[kind] = -1;
			pthread_mutex_init(&client->look_lock[kind], NULL);
		}
		for (uint32_t slot = 0; slot < ISWF_SLOTS; slot++) {
			client->requests[slot].client = client;
			client->requests[slot].slot = slot;
		}
	}
}

static void stop_threads(struct far *far)
{
	atomic_store(&far->stopping, true);
	if (far->stop >= 0)
		iswi_far_tell(far->stop);
	while (far->threads_count > 0)
		pthread_join(far->threads[--far->threads_count], NULL);
}

/* Nothing is taken any more; what is under way ends by itself. */
static void end_requests(struct far *far)
{
	const struct timespec tick = {.tv_nsec = 1000000};

	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		struct far_client *client = &far->clients[i];

		set_live(client, false);
		while (!is_idle(client))
			nanosleep(&tick, NULL);
		drop_ring(client);
		close_fd(&client->sock);
		close_fd(&client->pidfd);
		close_fd(&client->uffd);
	}
}

static void far_destroy(isw_frontend *frontend)
{
	struct far *far = ISWI_CONTAINER(frontend, struct far, frontend);

	stop_threads(far);
	end_requests(far);
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		close_fd(&far->look_epoll[kind]);
	close_fd(&far->control_epoll);
	close_fd(&far->stop);
	close_fd(&far->told);
	close_fd(&far->again);
	if (far->bounces != NULL)
		munmap(far->bounces, (size_t)ISWI_FAR_BOUNCES * ISWF_BLOCK_BYTES);
	if (far->table.kept != NULL)
		iswi_far_table_close(&far->table);
	free(far);
}

static int far_start(isw_engine *engine, const struct isw_frontend_config *config,
		     isw_frontend **frontend_out, struct isw_error *error)
{
	uint64_t blocks = iswi_engine_far_bytes(engine) / ISWF_BLOCK_BYTES;
	struct far *far;
	int code;

	if (blocks == 0 || blocks > UINT32_MAX / 2)
		return iswi_error(error, -EINVAL, "this device has no range for far memory");
	far = calloc(1, sizeof(*far));
	if (far == NULL)
		return iswi_error(error, -ENOMEM, "no memory for far memory's front end");
	init(far, engine, iswi_engine_far_offset(engine));
	code = iswi_far_table_open(&far->table, config->table_fd, (uint32_t)blocks, error);
	if (code != 0)
		goto err_far;
	code = make_descriptors(far);
	if (code == 0)
		code = make_bounces(far);
	if (code == 0)
		code = await_clients(far);
	if (code == 0)
		code = start_threads(far);
	if (code != 0) {
		iswi_error(error, code, "far memory's front end could not be set up: %s",
			   strerror(-code));
		goto err_far;
	}
	*frontend_out = &far->frontend;
	return 0;

err_far:
	far_destroy(&far->frontend);
	return code;
}

/* One more job: its socket, on which processes say hello. */
static int far_serve(isw_frontend *frontend, int32_t fd, struct isw_error *error)
{
	struct far *far = ISWI_CONTAINER(frontend, struct far, frontend);
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 0), code;

	if (own < 0)
		return iswi_error(error, -errno, "the job's socket cannot be served: %s",
				  strerror(errno));
	code = watch(far->control_epoll, own, ABOUT_JOB, (uint32_t)own);
	if (code != 0) {
		close(own);
		return iswi_error(error, code, "the job's socket cannot be served: %s",
				  strerror(-code));
	}
	return 0;
}

static void far_info(const isw_frontend *frontend, struct isw_frontend_info *info_out)
{
	struct far *far = ISWI_CONTAINER((isw_frontend *)(uintptr_t)frontend, struct far, frontend);

	info_out->size_bytes = (uint64_t)far->table.blocks * ISWF_BLOCK_BYTES;
	info_out->requests_max = ISWI_FAR_REQUESTS_MAX;
	info_out->connections = atomic_load_explicit(&far->clients_live, memory_order_relaxed);
	info_out->used_bytes = (uint64_t)iswi_far_places_used(&far->table) * ISWF_BLOCK_BYTES;
}

const struct iswi_frontend_ops iswi_far_ops = {
	.name = "far",
	.start = far_start,
	.destroy = far_destroy,
	.info = far_info,
	.serve = far_serve,
};
