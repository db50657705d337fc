/* SPDX-License-Identifier: Apache-2.0 */
/* The front end far: the lives of its clients (csrc/frontend/far.h), and what they cannot do. */
#include <arpa/inet.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "far_world.h"
#include "frontend/far_client.h"
#include "tests.h"

static const struct iswf_hello new_hello = {.magic = ISWF_MAGIC, .version = ISWF_VERSION};

/* What the client says when it comes back. */
static struct iswf_hello hello_of(const struct far_tester *t)
{
	struct iswf_hello hello = new_hello;

	hello.client = t->welcome.client;
	memcpy(hello.token, t->welcome.token, sizeof(hello.token));
	return hello;
}

/* Comes back, as often as it is told to ask again. */
static struct far_tester come_back(int job, const struct iswf_hello *hello, int uffd)
{
	for (uint32_t i = 0;; i++) {
		struct far_tester t = connect_with(job, *hello, uffd);

		if (t.welcome.refused == 0)
			return t;
		CHECK_EQ(t.welcome.refused, -EAGAIN);
		CHECK(i < 20000);
		close(t.sock);
		pause_ms(1);
	}
}

static struct far *far_of(const struct world *w)
{
	return ISWI_CONTAINER(w->frontend, struct far, frontend);
}

/* A userfaultfd that has memory. */
static int uffd_in_use(void)
{
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register range = {
		.range = {.len = ISWF_BLOCK_BYTES},
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	void *memory = mmap(NULL, ISWF_BLOCK_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int uffd = open_uffd();

	CHECK(memory != MAP_FAILED);
	range.range.start = (uintptr_t)memory;
	CHECK_EQ(ioctl(uffd, UFFDIO_API, &api), 0);
	CHECK_EQ(ioctl(uffd, UFFDIO_REGISTER, &range), 0);
	return uffd;
}

static void write_block(struct far_tester *t, uint32_t block)
{
	fill(t, WRITER, SECRET + block);
	CHECK_EQ(far_do(t, WRITER, ISWF_WRITE, block, 0, ISWF_BLOCK_PAGES), 0);
}

static void read_block(struct far_tester *t, uint32_t block)
{
	CHECK_EQ(far_do(t, 0, ISWF_READ, block, 0, ISWF_BLOCK_PAGES), 0);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		CHECK_EQ(word_of(t, 0, page), SECRET + block);
}

/* A process that does something and then waits to be killed. */
static pid_t start_child(const struct world *w, void (*run)(const struct world *w))
{
	int done[2];
	char byte;
	pid_t pid;

	CHECK_EQ(pipe2(done, O_CLOEXEC), 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		CHECK_EQ(prctl(PR_SET_PDEATHSIG, SIGKILL), 0);
		run(w);
		CHECK_EQ(write(done[1], "", 1), 1);
		for (;;)
			pause();
	}
	close(done[1]);
	CHECK_EQ(read(done[0], &byte, 1), 1);
	close(done[0]);
	return pid;
}

static void end_child(pid_t pid)
{
	int status;

	CHECK_EQ(kill(pid, SIGKILL), 0);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void connect_and_write(const struct world *w)
{
	struct far_tester t = connect_far(w->job);

	write_block(&t, 0);
	write_block(&t, 1);
}

/* ------------------------------------------------------------------- jobs' sockets */

/* The holder has a copy of the job's socket, so its end is told as long as it is watched. */
TEST(the_socket_of_an_ended_job_is_closed_once)
{
	struct isw_error error = {0};
	struct far_tester t;
	struct world w;
	int pair[2], others[64];
	uint32_t before;

	begin(&w);
	before = count_descriptors(NULL);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	CHECK_OK(isw_frontend_serve(w.frontend, pair[0], &error), error);
	close(pair[1]);
	wait_descriptors(NULL, before + 1); /* the copy that stands for the holder's */
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(others); i++)
		others[i] = memfd_create("other", MFD_CLOEXEC);
	for (uint32_t i = 0; i < 16; i++) { /* its thread comes by again and again */
		t = connect_far(w.job);
		leave_far(&t);
	}
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(others); i++)
		CHECK_EQ(close(others[i]), 0);
	close(pair[0]);
	finish(&w);
}

/* An agent probes the socket so; to read nothing is not to read the end. */
TEST(an_empty_packet_does_not_end_a_job)
{
	struct far_tester t;
	struct world w;

	begin(&w);
	CHECK_EQ(send(w.job, "", 0, 0), 0);
	CHECK_EQ(send(w.job, "x", 1, 0), 1);
	t = connect_far(w.job);
	leave_far(&t);
	finish(&w);
}

TEST(descriptors_that_no_hello_has_are_closed)
{
	struct iswf_hello hello = new_hello;
	int fds[HELLO_FDS_MAX];
	struct far_tester t;
	struct world w;
	uint32_t before;

	begin(&w);
	before = count_descriptors(NULL);
	for (uint32_t i = 0; i < HELLO_FDS_MAX; i++)
		fds[i] = memfd_create("other", MFD_CLOEXEC);
	send_hello(w.job, &hello, fds, HELLO_FDS_MAX);
	hello.off = ISWF_OFF_KERNEL;
	send_hello(w.job, &hello, fds, HELLO_FDS_MAX);
	hello.magic = 0;
	send_hello(w.job, &hello, fds, 1);
	for (uint32_t i = 0; i < HELLO_FDS_MAX; i++)
		close(fds[i]);
	t = connect_far(w.job); /* those before it have been heard */
	leave_far(&t);
	wait_descriptors(NULL, before);
	finish(&w);
}

static void try_eight(const struct world *w)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		int out[2];
		char byte;

		CHECK_EQ(pipe2(out, O_CLOEXEC), 0);
		if (fork() == 0) {
			struct far_tester t = connect_with(w->job, new_hello, open_uffd());

			CHECK_EQ(t.welcome.refused, i + 1 < ISWI_FAR_CLIENTS_MAX ? 0 : -ENOSPC);
			CHECK_EQ(write(out[1], "", 1), 1);
			for (;;)
				pause();
		}
		close(out[1]);
		CHECK_EQ(read(out[0], &byte, 1), 1); /* else its check has failed */
		close(out[0]);
	}
}

/* A job of many processes leaves a place for each other job's first. */
TEST(no_job_takes_every_place)
{
	struct far_tester t;
	struct world w;
	pid_t group;
	int other, status;

	begin(&w);
	other = add_job(&w);
	group = fork();
	CHECK(group >= 0);
	if (group == 0) {
		CHECK_EQ(setpgid(0, 0), 0);
		try_eight(&w);
		_exit(0);
	}
	CHECK_EQ(waitpid(group, &status, 0), group);
	CHECK_EQ(status, 0);
	t = connect_far(other);
	CHECK_EQ(connections(&w), ISWI_FAR_CLIENTS_MAX);
	leave_far(&t);
	CHECK_EQ(kill(-group, SIGKILL), 0);
	close(other);
	finish(&w);
}

TEST(destroy_closes_every_descriptor)
{
	struct far_tester t;
	struct world w;
	uint32_t before;
	int other;

	begin(&w);
	finish(&w);
	before = count_descriptors(NULL);
	begin(&w);
	other = add_job(&w);
	t = connect_far(w.job);
	leave_far(&t);
	t = connect_far(other);
	close(other);
	finish(&w);
	leave_far(&t);
	CHECK_EQ(count_descriptors(NULL), before);
}

/* ------------------------------------------------------------------------- hellos */

/* Whoever made the socket that a hello brings: the client ends with the process that sent it. */
TEST(a_client_is_who_sent_its_hello)
{
	struct world w;
	int pair[2], status;
	pid_t pid;

	begin(&w);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		struct far_tester t = {.sock = pair[0]};

		say_hello(w.job, &new_hello, pair[1], open_uffd());
		hear_welcome(&t);
		CHECK_EQ(t.welcome.refused, 0);
		write_block(&t, 0);
		_exit(0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
	wait_used(&w, 0);
	close(pair[0]);
	close(pair[1]);
	finish(&w);
}

/* A socket whose close waits until its peer has read all. */
static int lingering_socket(int *peer_out)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	const struct linger linger = {.l_onoff = 1, .l_linger = 300};
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	socklen_t bytes = sizeof(address);
	static char data[1 << 16];

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	CHECK_EQ(bind(listener, (struct sockaddr *)&address, bytes), 0);
	CHECK_EQ(listen(listener, 1), 0);
	CHECK_EQ(getsockname(listener, (struct sockaddr *)&address, &bytes), 0);
	CHECK_EQ(connect(sock, (struct sockaddr *)&address, bytes), 0);
	*peer_out = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	CHECK(*peer_out >= 0);
	close(listener);
	CHECK_EQ(setsockopt(sock, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)), 0);
	while (send(sock, data, sizeof(data), MSG_DONTWAIT) > 0)
		;
	return sock;
}

/* F10: ends and requests of others do not wait for it. */
TEST(a_descriptor_that_closes_slowly_holds_up_nobody)
{
	struct iswf_hello hello = new_hello;
	struct isw_frontend_info info;
	struct far_tester t;
	int sock, peer;
	struct world w;
	pid_t child;

	begin(&w);
	child = start_child(&w, connect_and_write);
	t = connect_far(w.job);
	write_block(&t, 3); /* its hello is over */
	sock = lingering_socket(&peer);
	hello.off = ISWF_OFF_KERNEL;
	pthread_mutex_lock(&far_of(&w)->lock); /* it cannot be closed there before it is here */
	send_hello(w.job, &hello, &sock, 1);
	close(sock);
	pthread_mutex_unlock(&far_of(&w)->lock);
	do
		isw_frontend_info(w.frontend, &info);
	while (info.far.off_kernel == 0);
	end_child(child);
	wait_used(&w, 1);
	read_block(&t, 3);
	close(peer);
	leave_far(&t);
	finish(&w);
}

/* The last of many hellos is one that takes long to hear: others are heard before it. */
TEST(one_who_says_hello_again_and_again_holds_up_nobody)
{
	struct iswf_hello hello = new_hello;
	int sock, peer, other, pair[2], uffd = open_uffd();
	struct far_tester t = {.ring = NULL};
	struct pollfd answer;
	struct world w;

	begin(&w);
	other = add_job(&w);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	sock = lingering_socket(&peer);
	hello.off = ISWF_OFF_KERNEL;
	pthread_mutex_lock(&far_of(&w)->lock); /* all wait while the first one is heard */
	for (uint32_t i = 0; i < 4; i++)
		send_hello(w.job, &hello, NULL, 0);
	send_hello(w.job, &hello, &sock, 1);
	close(sock);
	say_hello(other, &new_hello, pair[1], uffd);
	close(pair[1]);
	pthread_mutex_unlock(&far_of(&w)->lock);
	t.sock = pair[0];
	answer = (struct pollfd){.fd = t.sock, .events = POLLIN};
	CHECK_EQ(poll(&answer, 1, 60000), 1);
	hear_welcome(&t);
	CHECK_EQ(t.welcome.refused, 0);
	close(peer);
	leave_far(&t);
	close(other);
	close(uffd);
	finish(&w);
}

/* F21: the ring's memory may be there a moment later; until then its blocks are kept. */
TEST(a_client_that_finds_no_ring_comes_back_later)
{
	struct far_tester t, again;
	struct rlimit old, low;
	struct iswf_hello hello;
	int uffd = open_uffd();
	struct world w;

	begin(&w);
	t = connect_far(w.job);
	write_block(&t, 7);
	hello = hello_of(&t);
	succeed(&w);
	signal(SIGXFSZ, SIG_IGN);
	CHECK_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
	low = (struct rlimit){.rlim_cur = ISWF_RING_BYTES / 2, .rlim_max = old.rlim_max};
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
	again = connect_with(w.job, hello, uffd);
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
	CHECK_EQ(again.welcome.refused, -EFBIG);
	CHECK_EQ(connections(&w), 1);
	close(again.sock);
	again = come_back(w.job, &hello, uffd);
	read_block(&again, 7);
	leave_far(&t);
	leave_far(&again);
	close(uffd);
	finish(&w);
}

/* A token is known to every child that was forked since; it is the parent's all the same. */
TEST(a_child_does_not_come_back_as_its_parent)
{
	struct far_tester t;
	struct iswf_hello hello;
	int status, uffd = open_uffd();
	struct world w;
	pid_t pid;

	begin(&w);
	t = connect_far(w.job);
	write_block(&t, 2);
	hello = hello_of(&t);
	succeed(&w);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		CHECK_EQ(connect_with(w.job, hello, open_uffd()).welcome.refused, -EINVAL);
		_exit(0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
	leave_far(&t);
	t = come_back(w.job, &hello, uffd);
	read_block(&t, 2);
	leave_far(&t);
	close(uffd);
	finish(&w);
}

/* --------------------------------------------------------------------------- ends */

/* F20: while its memory lives, a process that lost its socket has its blocks. */
TEST(a_client_without_its_socket_keeps_its_blocks)
{
	int uffd = uffd_in_use();
	struct far_tester t, again;
	struct iswf_hello hello;
	struct world w;

	begin(&w);
	t = connect_with(w.job, new_hello, uffd);
	CHECK_EQ(t.welcome.refused, 0);
	write_block(&t, 4);
	hello = hello_of(&t);
	leave_far(&t);
	for (uint32_t i = 0; i < 8; i++) {
		again = come_back(w.job, &hello, uffd);
		read_block(&again, 4);
		leave_far(&again);
	}
	CHECK_EQ(used(&w), 1);
	CHECK_EQ(connections(&w), 1);
	close(uffd);
	finish(&w);
}

/* F20: its process lives on, its memory does not. */
TEST(a_program_that_is_executed_ends_the_former)
{
	struct world w;
	int executed[2];
	char byte;
	pid_t pid;

	begin(&w);
	CHECK_EQ(pipe2(executed, O_CLOEXEC), 0);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		struct far_tester t = connect_with(w.job, new_hello, uffd_in_use());

		CHECK_EQ(t.welcome.refused, 0);
		write_block(&t, 0);
		execl("/bin/sleep", "sleep", "1000", NULL);
		_exit(1);
	}
	close(executed[1]);
	CHECK_EQ(read(executed[0], &byte, 1), 0);
	close(executed[0]);
	wait_used(&w, 0);
	CHECK_EQ(connections(&w), 0);
	end_child(pid);
	finish(&w);
}

/* Executed while no device served it: what it says as a new client ends what it was. */
TEST(a_new_hello_ends_the_client_that_was_awaited)
{
	struct far_tester t, again;
	struct world w;

	begin(&w);
	t = connect_far(w.job);
	write_block(&t, 1);
	succeed(&w);
	CHECK_EQ(used(&w), 1);
	again = connect_far(w.job);
	wait_used(&w, 0);
	leave_far(&t);
	leave_far(&again);
	finish(&w);
}

/* F17: the client has its mapping for as long as it likes, but not our memory. */
TEST(the_memory_of_a_ring_is_given_back)
{
	struct far_tester t;
	struct stat attr;
	struct world w;

	begin(&w);
	t = connect_far(w.job);
	CHECK_EQ(fstat(t.ring_fd, &attr), 0);
	CHECK_EQ(attr.st_blocks * 512, ISWF_RING_BYTES);
	close(t.sock);
	for (uint32_t i = 0; attr.st_blocks != 0; i++) {
		CHECK(i < 20000);
		pause_ms(1);
		CHECK_EQ(fstat(t.ring_fd, &attr), 0);
	}
	t.sock = -1;
	leave_far(&t);
	finish(&w);
}

TEST(bells_of_the_ended_are_not_watched)
{
	struct far_tester t;
	struct world w;
	uint32_t before;

	begin(&w);
	before = count_descriptors("tfd:");
	t = connect_far(w.job);
	close(t.sock);
	wait_descriptors("tfd:", before);
	t.sock = -1;
	leave_far(&t);
	finish(&w);
}

/* A bell is the client's as much as ours: it may be made blocking, and emptied by somebody else. */
static void steal_from_bells(struct far_tester *t)
{
	for (uint32_t i = 0; i < 40000; i++) {
		int bell = t->bell[i % ISWF_KINDS];
		uint64_t count = 1;
		struct iovec data = {&count, sizeof(count)};

		if (i < ISWF_KINDS)
			CHECK_EQ(fcntl(bell, F_SETFL, 0), 0);
		CHECK_EQ(write(bell, &count, sizeof(count)), 8);
		(void)!preadv2(bell, &data, 1, -1, RWF_NOWAIT);
	}
}

/* F10 */
TEST(a_bell_that_blocks_holds_up_nobody)
{
	struct far_tester t;
	struct world w;

	begin(&w);
	in_child(&w, steal_from_bells);
	t = connect_far(w.job);
	for (uint32_t i = 0; i < 4; i++) {
		write_block(&t, i);
		read_block(&t, i);
	}
	leave_far(&t);
	finish(&w);
}

/* F17: who punches a hole finds zeros; nothing else comes of it. */
TEST(holes_in_a_ring_are_zeros_of_its_client)
{
	struct far_tester t;
	struct world w;

	begin(&w);
	t = connect_far(w.job);
	write_block(&t, 5);
	fill(&t, WRITER, SECRET);
	CHECK_EQ(fallocate(t.ring_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
			   ISWF_RING_BYTES),
		 0);
	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 6, 0, ISWF_BLOCK_PAGES), 0);
	read_block(&t, 5);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 6, 0, ISWF_BLOCK_PAGES), 0);
	CHECK_EQ(word_of(&t, 0, 0), 0);
	leave_far(&t);
	finish(&w);
}

/* What epoll had read of a client's end before another began in its place is not about that. */
TEST(an_event_of_an_earlier_life_ends_nobody)
{
	struct far_client *client;
	struct far_tester t;
	struct world w;
	pid_t child;

	begin(&w);
	child = start_child(&w, connect_and_write);
	t = connect_far(w.job);
	write_block(&t, 0);
	client = &far_of(&w)->clients[t.welcome.client - 1];
	pthread_mutex_lock(&far_of(&w)->lock);
	client->generation++;
	pthread_mutex_unlock(&far_of(&w)->lock);
	close(t.sock);
	end_child(child);
	wait_used(&w, 1); /* the child's end came after this one's */
	pthread_mutex_lock(&far_of(&w)->lock);
	CHECK_EQ(client->phase, ISWI_FAR_LIVE);
	client->generation--;
	pthread_mutex_unlock(&far_of(&w)->lock);
	wait_used(&w, 0);
	t.sock = -1;
	leave_far(&t);
	finish(&w);
}

/* The thread that ends clients looks at the others between two rounds. */
TEST(a_large_client_is_discarded_in_rounds)
{
	const uint64_t blocks = 200;
	struct isw_engine_config config = far_engine_config(blocks * ISWF_BLOCK_BYTES, -1, -1);
	int table = memfd_create("table", MFD_CLOEXEC), pair[2];
	struct isw_error error = {0};
	struct far_client *client;
	struct far_tester t;
	struct world w;
	uint32_t place;

	CHECK_OK(isw_engine_create(&config, NULL, &w.engine, &error), error);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	w.frontend = start_far(w.engine, table, pair[0]);
	t = connect_far(pair[1]);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 0, 0, 1), -ENOENT); /* its ring is looked at */
	client = &far_of(&w)->clients[t.welcome.client - 1];
	for (uint32_t i = 0; i < blocks; i++) {
		CHECK_EQ(iswi_far_place_get(&far_of(&w)->table, client->index, i, true, &place), 0);
		iswi_far_place_put(&far_of(&w)->table, place);
	}
	pthread_mutex_lock(&far_of(&w)->lock);
	iswi_far_begin_end(client, false);
	CHECK_EQ(iswi_far_step(client), 0); /* at once, but not now */
	place = iswi_far_places_used(&far_of(&w)->table);
	pthread_mutex_unlock(&far_of(&w)->lock);
	CHECK(place > 0 && place < blocks);
	wait_used(&w, 0);
	leave_far(&t);
	isw_frontend_destroy(w.frontend);
	isw_engine_destroy(w.engine);
	close(table);
	close(pair[0]);
	close(pair[1]);
}

/* ------------------------------------------------------------------------- answers */

/* What was in the far range before its table was made is nobody's, and never read. */
TEST(a_new_table_finds_zeros)
{
	struct far_tester t;
	struct world w;

	begin(&w);
	t = connect_far(w.job);
	write_block(&t, 0);
	close(w.table);
	w.table = memfd_create("table", MFD_CLOEXEC);
	succeed(&w);
	CHECK_EQ(used(&w), 0);
	leave_far(&t);
	t = connect_far(w.job);
	fill(&t, WRITER, SECRET);
	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 0, 0, 1), 0);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 0, 0, ISWF_BLOCK_PAGES), 0);
	CHECK_EQ(word_of(&t, 0, 0), SECRET);
	for (uint32_t page = 1; page < ISWF_BLOCK_PAGES; page++)
		CHECK_EQ(word_of(&t, 0, page), 0);
	leave_far(&t);
	finish(&w);
}

/* F5: who reads many pages learns that they failed, who reads one that it is lost. */
TEST(a_read_of_one_page_says_that_it_is_lost)
{
	struct far_tester t;
	struct world w;

	begin(&w);
	t = connect_far(w.job);
	write_block(&t, 0);
	for (uint32_t i = 0; i < w.donor.slabs; i++)
		CHECK_EQ(isw_slab_unmap(w.engine, i, 0, w.donor.generations[i]), 0);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 0, 0, ISWF_BLOCK_PAGES), -EIO);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 0, 0, 2), -EIO);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 0, 1, 1), -ENODATA);
	leave_far(&t);
	finish(&w);
}

static struct isw_frontend_info info_of(const struct world *w)
{
	struct isw_frontend_info info;

	isw_frontend_info(w->frontend, &info);
	return info;
}

/* For people: of the living, of the dead, and of those that never had far memory. */
TEST(what_processes_tell_is_summed_up)
{
	struct iswf_hello hello = new_hello;
	struct far_tester t, again;
	int uffd = open_uffd();
	struct world w;

	begin(&w);
	t = connect_far(w.job);
	write_block(&t, 0); /* its ring is looked at from here on */
	atomic_store(&t.ring->told.pages_out, 5);
	atomic_store(&t.ring->told.pages_back[ISWF_WHY_PINNED], 3);
	CHECK_EQ(info_of(&w).far.pages_out, 5);
	CHECK_EQ(info_of(&w).far.back_pinned, 3);
	atomic_store(&t.ring->pages_away, 9);
	CHECK_EQ(info_of(&w).away_bytes, 9 * ISWF_PAGE_BYTES);
	atomic_store(&t.ring->pages_away, 1); /* it falls, too */
	CHECK_EQ(info_of(&w).away_bytes, ISWF_PAGE_BYTES);
	atomic_store(&t.ring->pages_away, UINT64_MAX); /* a lie */
	CHECK_EQ(info_of(&w).away_bytes, ISWF_BLOCK_BYTES);
	leave_far(&t);
	while (connections(&w) > 0)
		pause_ms(1);
	CHECK_EQ(info_of(&w).away_bytes, 0);
	t = connect_far(w.job);
	write_block(&t, 0);
	atomic_store(&t.ring->told.pages_out, 7);
	CHECK_EQ(info_of(&w).far.pages_out, 12);
	hello.off = ISWF_OFF_CGROUP;
	send_hello(w.job, &hello, NULL, 0);
	while (info_of(&w).far.off_cgroup == 0)
		pause_ms(1);
	hello = hello_of(&t);
	succeed(&w);
	CHECK_EQ(info_of(&w).far.pages_out, 5); /* the other has not come back yet */
	again = come_back(w.job, &hello, uffd);
	read_block(&again, 0);
	atomic_store(&again.ring->told.pages_out, 8);
	CHECK_EQ(info_of(&w).far.pages_out, 13);
	CHECK_EQ(info_of(&w).far.off_cgroup, 1);
	leave_far(&t);
	leave_far(&again);
	while (connections(&w) > 0)
		pause_ms(1);
	CHECK_EQ(info_of(&w).far.pages_out, 13);
	close(uffd);
	finish(&w);
}

static void connect_with_much_away(const struct world *w)
{
	struct far_tester t = connect_far(w->job);

	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 0, 0, 1), 0); /* it is heard from here on */
	atomic_store(&t.ring->pages_away, 4096);
}

/* Each process of a job knows whether another one has much far memory, when the device was asked.
 */
TEST(processes_of_a_job_are_told_of_each_other)
{
	struct far_tester t;
	struct world w;
	pid_t pid;

	begin(&w);
	t = connect_far(w.job);
	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 0, 0, 1), 0);
	atomic_store(&t.ring->pages_away, 8192); /* its own does not count */
	(void)info_of(&w);
	CHECK_EQ(atomic_load(&t.ring->others), 0);
	pid = start_child(&w, connect_with_much_away);
	(void)info_of(&w);
	CHECK_EQ(atomic_load(&t.ring->others), 1);
	end_child(pid);
	while (connections(&w) > 1)
		pause_ms(1);
	CHECK_EQ(atomic_load(&t.ring->others), 0);
	leave_far(&t);
	while (connections(&w) > 0)
		pause_ms(1);
	finish(&w);
}

/* F25: who stops the device asks whether anybody would lose memory. */
TEST(connections_count_those_that_would_lose_memory)
{
	struct iswf_hello hello;
	struct far_tester t, again;
	int uffd = open_uffd();
	struct world w;

	begin(&w);
	CHECK_EQ(connections(&w), 0);
	t = connect_far(w.job);
	CHECK_EQ(connections(&w), 1);
	hello = hello_of(&t);
	succeed(&w);
	CHECK_EQ(connections(&w), 1); /* it has not come back, but it lives */
	again = come_back(w.job, &hello, uffd);
	CHECK_EQ(connections(&w), 1);
	leave_far(&t);
	leave_far(&again);
	while (connections(&w) > 0)
		pause_ms(1);
	close(uffd);
	finish(&w);
}
